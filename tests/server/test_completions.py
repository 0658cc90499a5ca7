"""`/v1/completions` with OpenAI's client and evaluation harnesses."""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

from logprobe import LLM
from pairs import encode_pair
from rewriting import save_rewriting_llama, save_sentencepiece_llama

if TYPE_CHECKING:
    from pathlib import Path

SENTENCEPIECE = "sentencepiece"
LINE_ENDS = "\u0085\u2028\u2029"  # JSON may contain these unescaped, and `splitlines` splits at them
PROMPT = "the cat and the dog é of"


def create(client: Any, **options: Any) -> Any:
    model = client.models.list().data[0].id
    return client.completions.create(**{"model": model, "prompt": PROMPT, "max_tokens": 6} | options)


def as_harness(server: Any, prompt: Any, **options: Any) -> dict[str, Any]:
    """Send the exact request of lm-evaluation-harness."""
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    reply = server.post("/v1/completions", model=server.service.model_name, prompt=prompt, **asked | options)
    assert reply.status_code == 200, reply.text
    return reply.json()


def harness_scores(choice: dict[str, Any], context_len: int) -> tuple[float, bool]:
    """Compute what that client computes from a reply."""
    rows = choice["logprobs"]
    numbers = rows["token_logprobs"][context_len:-1]
    tops = rows["top_logprobs"][context_len:-1]
    return sum(numbers), all(number == max(top.values()) for number, top in zip(numbers, tops, strict=True))


def test_arrays_are_parallel_and_offsets_exact(client: Any) -> None:
    choice = create(client, logprobs=2, max_tokens=30, seed=4, extra_body={"ignore_eos": True}).choices[0]
    rows = choice.logprobs
    assert (
        len(rows.tokens) == len(rows.token_logprobs) == len(rows.top_logprobs) == len(rows.text_offset) == 30
    )
    assert rows.text_offset[0] == 0
    for token, offset, following in zip(
        rows.tokens, rows.text_offset, [*rows.text_offset[1:], len(choice.text)], strict=True
    ):
        if following - offset == len(token):
            assert choice.text[offset:following] == token
        assert offset <= following


@pytest.mark.parametrize("prompt_kind", ["text", "ids"])
def test_an_echo_begins_with_the_prompt_and_its_numbers(client: Any, server: Any, prompt_kind: str) -> None:
    ids = server.llm.text.encode(PROMPT).tolist()
    prompt = PROMPT if prompt_kind == "text" else ids
    plain = create(client, prompt=prompt, logprobs=2, temperature=0).choices[0]
    echo = create(client, prompt=prompt, logprobs=2, temperature=0, echo=True).choices[0]
    assert echo.text == PROMPT + plain.text
    rows = echo.logprobs
    assert rows.token_logprobs[0] is None
    assert rows.top_logprobs[0] is None
    assert rows.tokens[len(ids) :] == plain.logprobs.tokens
    assert rows.token_logprobs[len(ids) :] == plain.logprobs.token_logprobs
    assert [offset - len(PROMPT) for offset in rows.text_offset[len(ids) :]] == plain.logprobs.text_offset
    pieces = zip(rows.tokens[1:], rows.text_offset[1:], strict=True)
    assert all(echo.text[offset:].startswith(token) for token, offset in pieces if "\\x" not in token)


@pytest.mark.parametrize(
    ("name", "prompt", "offsets"),
    [
        (SENTENCEPIECE, "the cat", [0, 0, 3, 4, 5, 6]),
        (SENTENCEPIECE, "é the", [0, 0, 0, 0, 1]),
        ("lower case", "THE cat", [0, 0, 3]),
        ("nfkc", "ﬃ the", [0, 0, 0, 0, 1]),
        ("swallowed spaces", "the  dog  cat", [0, 0, 3, 10]),
    ],
)
def test_an_echo_is_the_prompt_that_was_given(
    serve_llm: Any, tmp_path: Path, name: str, prompt: str, offsets: list[int]
) -> None:
    is_sentencepiece = name == SENTENCEPIECE
    folder = save_sentencepiece_llama(tmp_path) if is_sentencepiece else save_rewriting_llama(tmp_path, name)
    with LLM(str(folder), kv_cache_memory_bytes=1 << 20) as llm, serve_llm(llm) as server:
        asked = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        plain = server.post("/v1/completions", **asked).json()["choices"][0]
        echo = server.post("/v1/completions", **asked, echo=True, logprobs=0).json()["choices"][0]
        assert echo["text"] == prompt + plain["text"]
        assert echo["logprobs"]["text_offset"][: len(offsets)] == offsets
        assert len(echo["logprobs"]["text_offset"]) == len(offsets) + 3
        bare = server.post("/v1/completions", **asked, echo=True, add_special_tokens=False, logprobs=0).json()
        assert bare["choices"][0]["logprobs"]["text_offset"][: len(offsets) - 1] == offsets[1:]


@pytest.mark.parametrize("is_added", [True, False, None])
def test_special_tokens_are_added_to_a_prompt_unless_it_says_not(server: Any, is_added: bool | None) -> None:
    prompt = "<|bos|>" + PROMPT
    reply = server.post(
        "/v1/completions", prompt=prompt, max_tokens=1, prompt_logprobs=0, add_special_tokens=is_added
    ).json()
    ids = server.llm.text.encode(PROMPT).tolist()
    assert reply["usage"]["prompt_tokens"] == len(ids) + (is_added is not False)


def test_prompts_of_every_kind_come_back_in_order(client: Any, server: Any) -> None:
    texts = ["the cat", "a dog and", "on the"]
    ids = [server.llm.text.encode(text).tolist() for text in texts]
    alone = [create(client, prompt=text, temperature=0).choices[0].text for text in texts]
    together = create(client, prompt=texts, temperature=0)
    by_ids = create(client, prompt=ids, temperature=0)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == alone == [one.text for one in by_ids.choices]
    assert create(client, prompt=ids[1], temperature=0).choices[0].text == alone[1]
    several = create(client, prompt=texts, temperature=0, n=2)
    assert [choice.text for choice in several.choices] == [text for text in alone for _ in range(2)]


def test_a_prompt_is_scored_without_generating(client: Any, server: Any) -> None:
    choice = create(client, echo=True, max_tokens=0, logprobs=0).choices[0]
    assert choice.text == PROMPT
    assert choice.finish_reason == "length"
    from logprobe import SamplingParams

    (output,) = server.llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert choice.logprobs.token_logprobs[1:] == list(output.prompt_logprobs.logprobs)
    assert len(choice.logprobs.tokens) == len(output.prompt_token_ids)


def test_the_harness_finds_the_scores_of_the_offline_front_door(server: Any) -> None:
    pairs = [("the cat", " and the dog"), ("a", " cat"), ("on the dog", "s of"), ("the", " the the")]
    expected = server.llm.score(pairs)
    encoded = [encode_pair(server.llm.text, *pair) for pair in pairs]
    reply = as_harness(server, [ids.tolist() for ids, _ in encoded])
    for choice, (ids, start), score in zip(reply["choices"], encoded, expected, strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1
        total, is_greedy = harness_scores(choice, start)
        assert total == pytest.approx(score.logprob, abs=1e-4)
        assert is_greedy == score.is_greedy


def test_a_greedy_continuation_is_known_as_such(server: Any) -> None:
    ids = server.llm.text.encode(PROMPT).tolist()
    reply = server.post("/v1/completions", prompt=ids, temperature=0, max_tokens=4, return_token_ids=True)
    longer = ids + reply.json()["choices"][0]["token_ids"]
    assert harness_scores(as_harness(server, [longer])["choices"][0], len(ids))[1]
    assert not harness_scores(as_harness(server, [[*ids, 7, 8]])["choices"][0], len(ids))[1]


def test_one_entry_follows_the_prompt_also_at_the_end_of_text(server: Any) -> None:
    vocabulary = server.llm.text.vocabulary
    bias = {"logit_bias": {"1": 100}}
    choice = as_harness(server, PROMPT, **bias)["choices"][0]
    ids = server.llm.text.encode(PROMPT)
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(ids) + 1
    assert choice["logprobs"]["tokens"][-1] == vocabulary.token_text(1)
    assert choice["text"] == PROMPT


def test_a_prompt_one_longer_than_the_context_is_scored(server: Any) -> None:
    limit = server.service.capabilities.max_model_len
    ids = [5 + place % 200 for place in range(limit + 1)]
    rows = as_harness(server, [ids])["choices"][0]["logprobs"]
    assert len(rows["token_logprobs"]) == limit + 2
    assert all(value is not None for value in rows["token_logprobs"][1:-1])
    assert rows["token_logprobs"][-1] is None
    alone = as_harness(server, [ids], max_tokens=0)["choices"][0]["logprobs"]
    assert alone["token_logprobs"] == rows["token_logprobs"][:-1]
    refused = server.post("/v1/completions", prompt=[*ids, 5], max_tokens=0, echo=True, logprobs=1)
    assert refused.status_code == 400
    assert refused.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }


def test_temperature_does_not_change_what_a_score_reports(server: Any) -> None:
    cold = as_harness(server, PROMPT)["choices"][0]["logprobs"]
    hot = as_harness(server, PROMPT, temperature=1.7)["choices"][0]["logprobs"]
    assert hot["token_logprobs"][:-1] == cold["token_logprobs"][:-1]
    assert hot["top_logprobs"][:-1] == cold["top_logprobs"][:-1]


def test_the_gguf_client_finds_its_offsets(server: Any) -> None:
    context, continuation = "the cat and", " the dog"
    asked = {
        "prompt": context + continuation,
        "logprobs": 10,
        "temperature": 0.0,
        "max_tokens": 1,
        "echo": True,
    }
    rows = server.post("/v1/completions", **asked).json()["choices"][0]["logprobs"]
    first = next(place for place, offset in enumerate(rows["text_offset"]) if offset >= len(context))
    (score,) = server.llm.score([(context, continuation)])
    assert sum(rows["token_logprobs"][first:-1]) == pytest.approx(score.logprob, abs=1e-4)
    assert all(token in top for token, top in zip(rows["tokens"][1:], rows["top_logprobs"][1:], strict=True))


def test_no_entry_of_a_text_keyed_map_is_lost(server: Any) -> None:
    k = server.service.vocab_size
    rows = server.post("/v1/completions", prompt=PROMPT, logprobs=k, max_tokens=1).json()
    (top,) = rows["choices"][0]["logprobs"]["top_logprobs"]
    assert len(top) == k


def test_a_map_holds_the_chosen_token_and_k_more(client: Any) -> None:
    for k in (0, 1, 5):
        rows = create(client, logprobs=k, seed=1, max_tokens=20).choices[0].logprobs
        assert {len(top) for top in rows.top_logprobs} <= {max(k, 1), k + 1}
        for token, number, top in zip(rows.tokens, rows.token_logprobs, rows.top_logprobs, strict=True):
            assert top[token] == number


@pytest.mark.parametrize("num_tokens", [3, 20])
def test_a_map_of_what_was_drawn_from_holds_no_token_that_cannot_be_drawn(
    server: Any, num_tokens: int
) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "seed": 1}
    asked |= {"top_k": 2, "logprobs": 5, "echo": True}
    raw = server.post("/v1/completions", **asked).json()["choices"][0]["logprobs"]
    both = server.post("/v1/completions", logprobs_mode="both", **asked).json()["choices"][0]["logprobs"]
    alone = server.post("/v1/completions", logprobs_mode="processed_logprobs", **asked).json()
    assert both["top_logprobs"] == raw["top_logprobs"]
    maps = both["processed"]["top_logprobs"]
    assert alone["choices"][0]["logprobs"]["top_logprobs"] == raw["top_logprobs"][:-num_tokens] + maps
    assert [len(top) for top in maps] == [2] * num_tokens
    assert min(nats for top in maps for nats in top.values()) > -9999


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_holds_what_the_whole_reply_holds(server: Any, echo: bool) -> None:
    asked = {
        "prompt": [PROMPT, "on the"],
        "logprobs": 3,
        "seed": 6,
        "max_tokens": 20,
        "echo": echo,
        "n": 2,
        "stop": ["e"],
    }
    server.service.engine.forget_prefixes()
    whole = server.post("/v1/completions", **asked).json()
    server.service.engine.forget_prefixes()  # cached tokens are reported in usage
    text = server.post("/v1/completions", stream=True, stream_options={"include_usage": True}, **asked).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert text.endswith("data: [DONE]\n\n")
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        told = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in told) == choice["text"]
        assert told[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert list(chain(*(one["logprobs"][name] for one in told))) == choice["logprobs"][name]


def test_an_event_is_one_line_also_for_clients_that_end_lines_at_more_characters(server: Any) -> None:
    prompt = "".join(("a", *LINE_ENDS, "b"))
    asked = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "stream": True}
    text = server.post("/v1/completions", **asked).text
    *events, done = [line for line in text.splitlines() if line]
    assert done == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in events]
    assert "".join(one["text"] for chunk in chunks for one in chunk["choices"]).startswith(prompt)


def test_offsets_stay_exact_where_a_stop_string_cuts_a_token(client: Any) -> None:
    num_cut = 0
    for seed in range(20):
        free = create(client, seed=seed, max_tokens=30, logprobs=0).choices[0]
        tokens = enumerate(zip(free.logprobs.tokens, free.logprobs.text_offset, strict=True))
        inside = [
            place
            for place, (token, offset) in tokens
            if place > 2 and len(token) > 1 and free.text[offset:].startswith(token)
        ]
        if not inside:
            continue
        num_cut += 1
        stop = free.logprobs.tokens[inside[0]][1:]
        cut = create(client, seed=seed, max_tokens=30, logprobs=0, stop=stop).choices[0]
        assert cut.text == free.text[: free.text.index(stop)]
        assert cut.finish_reason == "stop"
        asked = {"include_stop_str_in_output": True}
        whole = create(client, seed=seed, max_tokens=30, logprobs=0, stop=stop, extra_body=asked).choices[0]
        assert whole.text == cut.text + stop
        assert whole.logprobs.tokens == cut.logprobs.tokens
        count = len(cut.logprobs.tokens)
        for ours, whole in zip(cut.logprobs.text_offset, free.logprobs.text_offset[:count], strict=True):
            assert ours == min(whole, len(cut.text))
    assert num_cut >= 5, "too few draws held a token of two characters"


def test_best_of_returns_the_likeliest(client: Any, server: Any) -> None:
    drawn = create(client, n=6, seed=1, max_tokens=8, logprobs=0)
    best = create(client, n=1, best_of=6, seed=1, max_tokens=8, logprobs=0)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    assert mean(best.choices[0]) == max(map(mean, drawn.choices))
    refused = server.post("/v1/completions", prompt=PROMPT, best_of=2, stream=True)
    assert refused.json()["error"]["param"] == "best_of"
