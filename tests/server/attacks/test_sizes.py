"""Bodies that would cost seconds or gigabytes are refused by count and size before any allocation."""

from __future__ import annotations

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.server.models import named_in

if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGES = [{"role": "user", "content": "the cat"}]
MANY = 1_600_000
MANY_LISTS = rb"\u002c\u005b\u005d" * 100_000  # escaped, for JSON inside a string


def chat(**more: Any) -> bytes:
    return json.dumps({"messages": MESSAGES, "max_tokens": 2, **more}).encode()


def completion(**more: Any) -> bytes:
    return json.dumps({"prompt": "the cat", "max_tokens": 2, **more}).encode()


# Route, body, and text that the message must contain.
HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "prompts": ("/v1/completions", lambda: completion(prompt=["a"] * MANY), "max_body_values"),
    "fewer prompts": ("/v1/completions", lambda: completion(prompt=["a"] * 100_000), "max_requests"),
    "continuations": (
        "/v1/loglikelihood",
        lambda: json.dumps({"context": "a", "continuations": ["b"] * 100_000}).encode(),
        "max_requests",
    ),
    "labels": (
        "/v1/label",
        lambda: json.dumps({"input": "a", "labels": [f"{n}." for n in range(100_000)]}).encode(),
        "max_requests",
    ),
    "texts of one label": (
        "/v1/label",
        lambda: json.dumps({"input": "a", "labels": {"a": [f"{n}." for n in range(100_000)]}}).encode(),
        "max_requests",
    ),
    "texts to label": (
        "/v1/label",
        lambda: json.dumps({"input": ["a"] * 100_000, "labels": ["b"]}).encode(),
        "max_requests",
    ),
    "texts times labels": (
        "/v1/label",
        lambda: json.dumps({"input": ["a"] * 400, "labels": [f"{n}." for n in range(400)]}).encode(),
        "max_requests",
    ),
    "a text for each label": (
        "/v1/label",
        lambda: json.dumps({"input": "a" * 5000, "labels": [f"{n}." for n in range(400)]}).encode(),
        "max_text_bytes",
    ),
    "a label after each text": (
        "/v1/label",
        lambda: json.dumps({"input": ["a"] * 400, "labels": ["b" * 5000]}).encode(),
        "max_text_bytes",
    ),
    "grades": (
        "/v1/judge",
        lambda: json.dumps({"input": "a", "scale": [*range(100_000)]}).encode(),
        "max_requests",
    ),
    "grades of texts": (
        "/v1/judge",
        lambda: json.dumps({"input": ["a"] * 400, "scale": [*range(400)]}).encode(),
        "max_requests",
    ),
    "a text to answer": (
        "/v1/uncertainty",
        lambda: json.dumps({"input": "1" * 8_000_000}).encode(),
        "max_text_bytes",
    ),
    "tokens of answers": (
        "/v1/uncertainty",
        lambda: json.dumps({"input": "1", "n": 128, "max_tokens": 10**9}).encode(),
        "max_tokens_in_flight",
    ),
    "documents": (
        "/v1/rerank",
        lambda: json.dumps({"query": "a", "documents": ["b"] * 100_000}).encode(),
        "max_requests",
    ),
    "a query for each document": (
        "/v1/rerank",
        lambda: json.dumps({"query": "a" * 1_000_000, "documents": ["b"] * 500}).encode(),
        "max_text_bytes",
    ),
    "a template for each document": (
        "/rerank",
        lambda: json.dumps(
            {
                "query": "a",
                "documents": ["b"] * 500,
                "template": ["c" * 1_000_000, "{query}{document}" + "c" * 1_000_000, "c" * 1_000_000],
            }
        ).encode(),
        "max_text_bytes",
    ),
    "hidden states of many prompts": (
        "/v1/hidden_states",
        lambda: json.dumps({"prompts": [[1]] * 20_000}).encode(),
        "max_requests",
    ),
    "next-token prompts": (
        "/v1/next_token_logprobs",
        lambda: json.dumps({"prompts": [[1]] * 20_000}).encode(),
        "max_requests",
    ),
    "messages": ("/v1/chat/completions", lambda: chat(messages=MESSAGES * 200_000), "max_body_values"),
    "fewer messages": ("/v1/chat/completions", lambda: chat(messages=MESSAGES * 10_000), "max_messages"),
    "items": (
        "/v1/responses",
        lambda: json.dumps({"input": MESSAGES * 10_000}).encode(),
        "max_messages",
    ),
    "digits": ("/v1/completions", lambda: completion(prompt="1" * 8_000_000), "max_text_bytes"),
    "fewer digits": (
        "/v1/completions",
        lambda: completion(prompt="1" * 800_000),
        "exceeds the model's context",
    ),
    "a long conversation": (
        "/v1/chat/completions",
        lambda: chat(messages=[{"role": "user", "content": "1" * 800_000}]),
        "exceeds the model's context",
    ),
    "a context for each continuation": (
        "/v1/loglikelihood",
        lambda: json.dumps({"context": "a" * 5000, "continuations": ["b"] * 400}).encode(),
        "max_text_bytes",
    ),
    "a context of ids for each continuation": (
        "/v1/loglikelihood",
        lambda: json.dumps({"context": [5] * 400_000, "continuations": [[6]] * 500}).encode(),
        "at most",
    ),
    "ids that end the text of each prompt": (
        "/v1/completions",
        lambda: completion(prompt=[[5]] * 400, stop_token_ids=[6] * 60_000),
        "max_body_values",
    ),
    "a grammar for each prompt": (
        "/v1/completions",
        lambda: completion(
            prompt=[[5]] * 400, response_format={"type": "choice", "choice": [f"v{i}" for i in range(1_900)]}
        ),
        "max_body_values",
    ),
    "a long grammar for each prompt": (
        "/v1/completions",
        lambda: completion(prompt=[[5]] * 400, guided_regex="ab" * 100_000),
        "max_body_values",
    ),
    "arguments for each prompt": (
        "/v1/completions",
        lambda: completion(
            prompt=[[5]] * 400, logits_processors_args={"logit_bias": {str(i): 1 for i in range(40_000)}}
        ),
        "max_body_values",
    ),
    "text to tokenise": (
        "/tokenize",
        lambda: json.dumps({"prompt": "1" * 8_000_000}).encode(),
        "max_text_bytes",
    ),
    "allowed ids": ("/v1/completions", lambda: completion(allowed_token_ids=[1] * 300_000), "max_token_ids"),
    "named ids": (
        "/v1/completions",
        lambda: completion(logprobs=1, logprob_token_ids=list(range(5_000))),
        "max_logprob_token_ids",
    ),
    "biases": (
        "/v1/completions",
        lambda: completion(logit_bias={str(i): 1 for i in range(60_000)} | {"a": 1}),
        "",
    ),
    "bad words": ("/v1/completions", lambda: completion(bad_words=["ab"] * 200_000), "max_bad_words"),
    "stops": ("/v1/completions", lambda: completion(stop=["ab"] * 200_000), "max_stop"),
    "a long stop": ("/v1/completions", lambda: completion(stop="a" * 1_000_000), "max_stop_bytes"),
    "JSON in a text, its marks escaped": (
        "/v1/completions",
        lambda: completion(guided_json="X").replace(b"X", rb"\u005b\u005B\u005d" + MANY_LISTS + rb"\u005d"),
        "max_body_values",
    ),
    "lists in lists": (
        "/v1/chat/completions",
        lambda: chat(messages=[{"role": "user", "content": [[]] * 1_000_000}]),
        "max_body_values",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_beyond_a_limit_is_a_400_that_names_it_and_holds_nobody_up(attacked: Any, name: str) -> None:
    path, make, told = HOSTILE[name]
    data = make()
    with attacked.watched():
        reply = attacked.send(path, data)
    assert reply.status == 400, reply.data[:300]
    assert told in reply.error["message"]


@pytest.mark.parametrize("field", ["model", "lora", "lora_name"])
def test_a_name_that_is_no_text_is_not_built_to_choose_the_model(field: str) -> None:
    data = b'{"model": "other", "%s": [[]%s]}' % (field.encode(), b",[]" * 1_000_000)
    tracemalloc.start()
    try:
        assert named_in(data) == ()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000  # for a million lists, which would take tens of millions of bytes


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_long_text_took_is_returned(serve_process: Any, count: int) -> None:
    """Tokenization takes hundreds of times the text's bytes, which the worker's heap arena would keep."""
    data = json.dumps({"prompt": "the cat " * 120_000}).encode()
    with serve_process() as server:
        server.check_alive()
        with server.watched():
            replies = [server.send("/tokenize", data) for _ in range(count)]
    assert [reply.status for reply in replies] == [200] * count


REJECTED: dict[str, Callable[[], bytes]] = {
    "too much text": lambda: completion(prompt="1" * 8_000_000),
    "too many values": lambda: completion(prompt=["a"] * 1_300_000),
    "no JSON": lambda: b'{"prompt": "' + b"1" * 8_000_000,
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_rejected_bodies_took_is_returned(serve_process: Any, name: str) -> None:
    data = REJECTED[name]()
    with serve_process() as server:
        server.check_alive()
        with server.watched(), ThreadPoolExecutor(8) as clients:
            replies = list(clients.map(lambda _: server.send("/v1/completions", data), range(40)))
    assert {reply.status for reply in replies} == {400}


def test_named_ids_are_counted_as_the_bytes_that_they_take(serve_process: Any) -> None:
    flags = ("--max-logprob-token-ids", "-1", "--max-logprob-bytes", "4000000")
    with serve_process(*flags) as server:
        body = {"prompt": [5] * 100, "max_tokens": 1, "prompt_logprobs": 0}
        ids = list(range(200))
        assert server.post("/v1/completions", logprobs=0, **body).status == 200
        reply = server.post("/v1/completions", logprobs=0, logprob_token_ids=ids, **body)
        assert reply.status == 400
        assert "max_logprob_bytes" in reply.error["message"]


def test_a_conversation_counts_once_for_each_continuation(serve_process: Any) -> None:
    """Like a context: it is tokenized with each."""
    with serve_process("--max-text-bytes", "100000") as server:
        short = [{"role": "user", "content": "1" * 50}]
        assert server.post("/v1/loglikelihood", messages=short, continuations=["b"] * 400).status == 200
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "1" * 500}]}
        labels = [f"{number}." for number in range(400)]
        for path, asked in (
            ("/v1/loglikelihood", {"continuations": ["b"] * 400}),
            ("/v1/label", {"labels": labels}),
            ("/v1/judge", {"scale": [*range(400)]}),
        ):
            reply = server.post(path, **body, **asked)
            assert reply.status == 400, path
            assert "max_text_bytes" in reply.error["message"]
        assert server.post("/v1/label", messages=short, labels=labels).status == 200
        assert reply.error["param"] == "messages"


@pytest.mark.parametrize("depth", [150, 900, 100_000])
@pytest.mark.parametrize("name", ["logits_processors_args", "messages", "response_format"])
def test_a_body_that_is_nested_deeply_is_a_400(attacked: Any, name: str, depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    value = f"[{nested}]" if name == "messages" else nested
    body = f'{{"messages":{json.dumps(MESSAGES)},"{name}":{value}}}'
    reply = attacked.send("/v1/chat/completions", body.encode())
    assert reply.status == 400, reply.data[:300]
    attacked.check_alive()


def test_all_limits_are_told(attacked: Any) -> None:
    told = json.loads(attacked.get("/v1/capabilities").data)["limits"]
    assert told["max_text_bytes"] == 1 << 20
    assert told["max_grammar_parts"] == 10_000
