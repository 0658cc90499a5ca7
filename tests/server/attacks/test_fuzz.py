"""Request bodies of any form: each gets a reply, never a server error, and the server keeps running."""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import fuzz
from logprobe.server.app import OPERATORS, ROUTES
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server_process import Attacked

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the cat", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2},
    "/v1/responses": {"input": "the cat", "max_output_tokens": 2},
    "/v1/loglikelihood": {"context": "the", "continuations": [" cat", " dog"]},
    "/v1/label": {"input": "the", "labels": [" cat", " dog"]},
    "/generative_scoring": {"query": "the", "items": [" cat", " dog"], "label_token_ids": [5, 6]},
    "/v1/score": {"query": "the", "items": [" cat", " dog"], "label_token_ids": [5, 6]},
    "/v1/judge": {"input": "the", "scale": [1, 2, 10]},
    "/v1/uncertainty": {"input": "the", "n": 2, "max_tokens": 2},
    "/v1/rerank": {"query": "the", "documents": [" cat"], "template": ["", "{query}{document}", ":"]},
    "/v2/rerank": {"query": "the", "documents": [" cat"], "template": ["", "{query}{document}", ":"]},
    "/rerank": {"query": "the", "documents": [" cat"], "template": ["", "{query}{document}", ":"]},
    "/v1/next_token_logprobs": {"prompts": ["the cat", "a"]},
    "/v1/hidden_states": {"prompts": ["the cat", "a"]},
    "/tokenize": {"prompt": "the cat"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/tokenize": {"prompt": "the cat"},
    "/v1/detokenize": {"tokens": [5, 6]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/reset_prefix_cache": {},
    "/ping": {},
}
# Valid statuses for any input; 500 and above are server faults.
ANSWERS = {200, 400, 404, 413, 429}
# `attacked` has no operator key, `apart` has this one.
OPERATOR_KEY = "an-operators-own-key"
NO_KEY = {403}
PLAIN_ROUTES = [(method, path) for method, path, _ in ROUTES if method != "POST"]
MAX_BYTES = 1 << 15  # maximum size of an error reply, in which each character may be escaped

NUMBER = st.one_of(
    st.integers(-2, 300),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
)
LEAF = st.one_of(
    st.none(), st.booleans(), NUMBER, st.text(max_size=8), st.sampled_from(["auto", "json_object"])
)
VALUE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
IDS = st.lists(st.integers(-1, 400), max_size=6)
TEXTS = st.text(max_size=8) | st.lists(st.text(max_size=5), max_size=4)
FIELDS = ("name", "tool_calls", "refusal", "annotations", "phase", "mood", "w" * 5000)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": VALUE},
        optional=dict.fromkeys(FIELDS, st.none() | VALUE),
    ),
    max_size=3,
)
# Fields with mostly valid values, so that the code behind type validation is reached as well.
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(TEXTS, IDS, st.lists(IDS, max_size=3)),
    "messages": MESSAGES,
    "input": TEXTS | MESSAGES,
    "continuations": st.lists(st.text(max_size=5) | IDS, max_size=4),
    "context": st.text(max_size=5) | IDS,
    "labels": TEXTS | st.dictionaries(st.text(max_size=3), TEXTS, max_size=3),
    "correction": st.sampled_from(["none", "length", "calibrated", "other"]),
    "content_free": TEXTS | MESSAGES,
    "scale": st.lists(st.integers(-2, 120) | st.floats(), max_size=5),
    "query": st.text(max_size=5),
    "documents": st.lists(
        st.text(max_size=5) | st.fixed_dictionaries({"text": st.text(max_size=5)}), max_size=4
    ),
    "template": st.lists(st.text("{querydocmnt}", max_size=12), max_size=4),
    "top_n": st.integers(-1, 5),
    "return_documents": st.booleans(),
    "prompts": st.lists(st.text(max_size=5) | IDS, max_size=4),
    "tokens": IDS,
    "max_tokens": st.integers(-1, 130),
    "n": st.integers(0, 9),
    "best_of": st.integers(0, 9),
    "temperature": st.floats(-1, 3) | st.integers(0, 2),
    "top_p": st.floats(-1, 2) | st.just(1),
    "top_k": st.integers(-2, 400),
    "min_p": st.floats(-1, 2) | st.integers(0, 1),
    "min_tokens": st.integers(-1, 9),
    "seed": st.integers(),
    "repetition_penalty": st.floats() | st.integers(0, 3),
    "presence_penalty": st.floats(-3, 3) | st.integers(-2, 2),
    "frequency_penalty": st.floats(-3, 3) | st.integers(-2, 2),
    "logprobs": st.booleans() | st.integers(-2, 25),
    "top_logprobs": st.integers(-2, 25),
    "prompt_logprobs": st.integers(-2, 25),
    "logprob_token_ids": IDS | st.lists(IDS, max_size=4),
    "logprobs_mode": st.sampled_from(["raw_logprobs", "processed_logprobs", "both", "neither"]),
    "stop": TEXTS,
    "stop_token_ids": IDS,
    "allowed_token_ids": IDS,
    "bad_words": st.lists(st.text(max_size=5), max_size=4),
    "logit_bias": st.dictionaries(
        st.integers(-1, 400).map(str), st.floats(-200, 200) | st.integers(-100, 100), max_size=4
    ),
    "echo": st.booleans(),
    "entropy": st.booleans(),
    "varentropy": st.booleans(),
    "margin": st.booleans(),
    "explain": st.booleans(),
    "field_logprobs": st.sampled_from([False, True, "members"]),
    "stream": st.booleans(),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "unconditional": st.booleans(),
    "add_special_tokens": st.booleans(),
    "dtype": st.sampled_from(["float32", "float16", "int8"]),
    "lora": st.text(max_size=4),
    "lora_name": st.text(max_size=4),
    "lora_path": st.text(max_size=4)
    | st.sampled_from(["/", "/dev/zero", "/proc/self", "~", "a\0b", "x" * 5000]),
    "model_path": st.text(max_size=4)
    | st.sampled_from(["/", "/dev/zero", "/proc/self", "~", "a\0b", "x" * 5000]),
    "load_inplace": st.booleans(),
    "weight_version": st.text(max_size=4),
    "model": st.text(max_size=4),
    "logits_processors_args": st.dictionaries(st.text(max_size=4), VALUE, max_size=2),
    "include": st.lists(st.text(max_size=5) | st.just("message.output_text.logprobs"), max_size=2),
    "previous_response_id": st.text(max_size=5),
    "text": VALUE,
}


@st.composite
def bodies(draw: Any) -> tuple[str, Any]:
    path = draw(st.sampled_from(sorted(GOOD)))
    body: Any = dict(GOOD[path])
    for name in draw(st.lists(st.sampled_from(sorted({*LIKELY, *body})), max_size=4)):
        body[name] = draw(LIKELY.get(name, VALUE) if draw(st.integers(0, 4)) else VALUE)
    if not draw(st.integers(0, 15)):
        body[draw(st.text("ab\n\u202e💥", max_size=3)) * draw(st.integers(1, 5000))] = draw(VALUE)
    if not draw(st.integers(0, 15)):
        body = draw(VALUE)
    return path, body


def answers_of(path: str) -> set[int]:
    """Return the valid statuses of a path on a server without an operator key."""
    return NO_KEY if path in OPERATORS else ANSWERS


def test_every_route_is_fuzzed(attacked: Any) -> None:
    described = json.loads(attacked.get("/openapi.json").data)["paths"]
    served = {(method.upper(), path) for path, methods in described.items() for method in methods}
    fuzzed = {("POST", path) for path in GOOD} | {(method, path) for method, path in PLAIN_ROUTES}
    assert {(method, path.replace(":path", "")) for method, path in fuzzed} == served


@pytest.mark.parametrize("path", GOOD)
def test_the_body_from_which_others_are_made_is_valid(apart: Any, path: str) -> None:
    reply = apart.send(path, json.dumps(GOOD[path]).encode(), Authorization=f"Bearer {OPERATOR_KEY}")
    is_refused = path in OPERATORS and path != "/reset_prefix_cache"  # such a folder does not exist
    assert reply.status == (400 if is_refused else 200), reply.data


@pytest.mark.fuzz
@fuzz(2)
@given(asked=bodies())
def test_every_body_is_answered(attacked: Any, asked: tuple[str, Any]) -> None:
    path, body = asked
    reply = attacked.send(path, json.dumps(body).encode())
    assert reply.status in answers_of(path), reply.data[:500]
    if reply.status != 200:
        assert reply.error["message"].isprintable()
        assert len(reply.data) < MAX_BYTES


@pytest.fixture(scope="module")
def apart(serve_process: Any) -> Iterator[Attacked]:
    """A server with an engine process, which must be the same one throughout."""
    with serve_process("--engine-process", "--operator-key", OPERATOR_KEY) as server:
        engines = psutil.Process(server.process.pid).children()
        yield server
        assert psutil.Process(server.process.pid).children() == engines


@pytest.mark.fuzz
@fuzz()
@given(asked=bodies())
def test_every_body_is_answered_where_the_engine_is_a_process(apart: Any, asked: tuple[str, Any]) -> None:
    path, body = asked
    key = {"Authorization": f"Bearer {OPERATOR_KEY}"} if path in OPERATORS else {}
    reply = apart.send(path, json.dumps(body).encode(), **key)
    assert reply.status in ANSWERS, reply.data[:500]


@pytest.mark.fuzz
@fuzz()
@given(
    route=st.sampled_from(PLAIN_ROUTES),
    name=st.text(min_size=1, max_size=8),
    query=st.lists(
        st.tuples(
            st.sampled_from(["limit", "order", "after", "model", "x"]),
            st.text(max_size=5) | NUMBER.map(str) | st.sampled_from(["asc", "desc"]),
        ),
        max_size=3,
    ),
    body=st.none() | st.binary(max_size=20),
)
def test_every_route_without_a_body_is_answered(
    attacked: Any, route: tuple[str, str], name: str, query: list[tuple[str, str]], body: bytes | None
) -> None:
    method, path = route
    target = re.sub("{[^}]*}", quote(name, safe=""), path) + f"?{urlencode(query)}"
    reply = attacked.ask(method, target, body)
    assert reply.status in ANSWERS, reply.data[:500]


@pytest.mark.fuzz
@fuzz()
@given(path=st.sampled_from(sorted(GOOD)), data=st.binary(max_size=60), place=st.integers(0, 99))
def test_bytes_that_are_no_body_are_answered(attacked: Any, path: str, data: bytes, place: int) -> None:
    good = bytearray(json.dumps(GOOD[path]).encode())
    good[place % len(good) : place % len(good)] = data
    reply = attacked.send(path, bytes(good))
    assert reply.status in answers_of(path), reply.data[:500]


TRAILERS = st.lists(st.tuples(st.text("abX-:", max_size=4), st.binary(max_size=8)), max_size=3)


@pytest.mark.fuzz
@fuzz()
@given(asked=bodies(), size=st.integers(1, 50), trailers=TRAILERS, num_read=st.sampled_from([0, 1, 1 << 16]))
def test_chunks_trailers_and_replies_that_are_left_do_no_harm(
    attacked: Any,
    asked: tuple[str, Any],
    size: int,
    trailers: list[tuple[str, bytes]],
    num_read: int,
) -> None:
    path, body = asked
    data = json.dumps(body).encode()
    parts = [data[place : place + size] for place in range(0, len(data), size)]
    lines = [name.encode() + b": " + value for name, value in trailers]
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", attacked.port), PATIENCE_S) as link:
        link.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        # An invalid trailer closes the connection, at once or during a reply.
        with suppress(ConnectionError):
            link.sendall(b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts))
            link.sendall(b"\r\n".join([b"0", *lines, b"", b""]))
            status = link.recv(num_read)[9:12]
            assert not status or int(status) in answers_of(path) | {400}  # 400 for an invalid trailer
    assert attacked.get("/health").status == 200


PATTERN = st.text("ab(|)*+?[]{}\\d^$.", max_size=8)
NAME = st.sampled_from("ab")
SCHEMA_TYPES = ["object", "array", "string", "integer", "number", "boolean", "null"]
SCHEMA = st.recursive(
    st.one_of(
        st.fixed_dictionaries({"type": st.sampled_from(SCHEMA_TYPES)}),
        st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "x", ""])}),
        st.fixed_dictionaries({"enum": st.lists(LEAF, max_size=3)}),
        st.fixed_dictionaries(
            {"type": st.just("string"), "pattern": st.text("ab(|)*+?[]{}\\d^$.", max_size=8)}
        ),
        VALUE,
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": NUMBER}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(NAME, inner, max_size=2),
            }
        ),
        st.fixed_dictionaries({"$defs": st.dictionaries(NAME, inner, max_size=2)}),
    ),
    max_leaves=6,
)
REGEX = st.text("ab(|)*+?[]{}0123456789,\\dwsS^$.-é", max_size=16)
RULE = st.tuples(
    st.sampled_from(["start", "a", "b", "T"]), st.text('abT" |()*+?~/[]{}0123456789\\', max_size=14)
)
EBNF = st.lists(RULE, max_size=5).map(lambda rules: "".join(f"{name}: {body}\n" for name, body in rules))
FORMATS = st.one_of(
    SCHEMA.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
    REGEX.map(lambda regex: {"type": "regex", "regex": regex}),
    EBNF.map(lambda ebnf: {"type": "ebnf", "ebnf": ebnf}),
    st.lists(st.text(max_size=4), max_size=5).map(lambda texts: {"type": "choice", "choice": texts}),
)


@pytest.mark.fuzz
@fuzz(2)
@given(response_format=FORMATS)
def test_every_grammar_is_used_or_refused(attacked: Any, response_format: dict[str, Any]) -> None:
    reply = attacked.post("/v1/completions", **GOOD["/v1/completions"], response_format=response_format)
    # A grammar that exceeds its limits only during generation fails its own request.
    assert reply.status in ANSWERS or "GrammarLogitsProcessor" in reply.error["message"], reply.data[:500]
