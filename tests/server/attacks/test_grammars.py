"""Grammars that would crash or block the process are refused by size before compilation."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest

from logprobe.analysis.schemas import Schema, json_text
from logprobe.errors import ParameterError
from refusals import raises

MESSAGES = [{"role": "user", "content": "the cat"}]


def ref_chain(length: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "string"}}}


def binary_tree(depth: int) -> dict[str, Any]:
    if not depth:
        return {"type": "integer"}
    child = binary_tree(depth - 1)
    return {"type": "object", "properties": {"a": child, "b": child}, "required": ["a", "b"]}


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def rules(length: int, name: str) -> dict[str, Any]:
    first = "start: " + name.format(0) + "\n"
    chain = "".join(f"{name.format(i)}: {name.format(i + 1)}\n" for i in range(length))
    return {"type": "ebnf", "ebnf": first + chain + f'{name.format(length)}: "a"\n'}


HOSTILE: dict[str, dict[str, Any]] = {
    "refs": of_schema(ref_chain(3_000)),
    "many refs": of_schema(ref_chain(50_000)),
    "rules": rules(3_000, "r{}"),
    "many rules": rules(100_000, "r{}"),
    "terminals": rules(30_000, "T{}"),
    "tree": of_schema(binary_tree(12)),
    "choices": {"type": "choice", "choice": [f"v{i}" for i in range(200_000)]},
    "regex": {"type": "regex", "regex": "(" * 100_000 + "a" + ")" * 100_000},
    "long regex": {"type": "regex", "regex": "|".join(f"ab{i}" for i in range(100_000))},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_a_400_or_served_and_holds_nobody_up(attacked: Any, name: str) -> None:
    data = json.dumps({"messages": MESSAGES, "max_tokens": 2, "response_format": HOSTILE[name]}).encode()
    with attacked.watched():
        reply = attacked.send("/v1/chat/completions", data)
    assert reply.status in {200, 400}, reply.data[:300]
    if reply.status == 400:
        assert reply.error["param"] in {"response_format", None}  # None: the body as a whole


LETTERS = " | ".join(f'"{letter}"' for letter in "abcdefghijklmnopqrstuvwxyz")
AMBIGUOUS = f"start: e\ne: e e | e e e | {LETTERS}\n"


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_ambiguous_grammar_is_followed_as_far_as_its_bounds_go(attacked: Any, is_stream: bool) -> None:
    body = {"prompt": "the cat", "max_tokens": 120, "n": 4, "logit_bias": {"1": -100}, "stream": is_stream}
    with attacked.watched():
        reply = attacked.post("/v1/completions", response_format={"type": "ebnf", "ebnf": AMBIGUOUS}, **body)
    assert reply.status == (200 if is_stream else 400), reply.data[:300]
    assert b"too many ways" in reply.data
    assert not [line for line in attacked.log if "too many ways" in line]  # the client's mistake


def test_a_schema_that_is_nested_deeply_is_a_400(attacked: Any) -> None:
    schema = '{"type":"array","items":' * 900 + "{}" + "}" * 900
    body = f'{{"prompt":"a","response_format":{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}}}'
    assert attacked.send("/v1/completions", body.encode()).status == 400
    attacked.check_alive()


def alternatives(num_ways: int, num_keys: int) -> dict[str, Any]:
    """Return a schema with `num_ways` alternative values, each with `num_keys` properties."""
    parts: dict[str, Any] = {f"p{number}": True for number in range(num_keys)}
    return {"properties": parts, "anyOf": [{"enum": [number]} for number in range(num_ways)]}


def doubled(word: str, last: Any) -> dict[str, Any]:
    """Return a schema where each definition refers to the next one twice."""
    steps: dict[str, Any] = {f"a{i}": {word: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(90)}
    return {"$ref": "#/$defs/a0", "$defs": steps | {"a90": last}, "enum": [1]}


@pytest.mark.parametrize(
    "schema",
    [
        alternatives(1_900, 250),
        alternatives(1_900, 20_000),
        {"properties": {f"p{i}": alternatives(1_900, 3) for i in range(30)}},
        {"anyOf": [{"$ref": "#/$defs/a"}] * 2_000, "$defs": {"a": alternatives(1_900, 0)}},
        doubled("anyOf", False),
        doubled("allOf", {"enum": [1]}),
    ],
    ids=range(6),
)
def test_alternatives_are_counted_before_they_are_laid_out(schema: dict[str, Any]) -> None:
    schema = json.loads(json.dumps(schema))  # as parsed from a body: no shared subobjects
    tracemalloc.start()
    try:
        with raises(ParameterError, parameter="schema"):
            Schema(schema).check()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000


def test_a_value_is_read_of_many_alternatives_once() -> None:
    names = [f"value {number}" for number in range(20_000)]
    schema = Schema({"enum": names, "anyOf": [{"required": [name]} for name in names[:1_900]]})
    start = time.thread_time()
    assert json_texts(names) == len(names)
    control = time.thread_time() - start
    start = time.thread_time()
    assert schema.members("") == names
    assert time.thread_time() - start < 100 * control  # as long as for each alternative alone


def json_texts(values: list[str]) -> int:
    return len({json_text(value) for value in values})
