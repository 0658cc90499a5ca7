"""Grammars over HTTP with a tokenizer that adds a space before a text."""

from __future__ import annotations

import json
from typing import Any

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK: Any = {"role": "user", "content": "the row"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "is_old": {"type": "boolean"}},
    "required": ["kind", "is_old"],
    "additionalProperties": False,
}
JSON_SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True},
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def spaced(spaced_llm: Any, serve_llm: Any) -> Any:
    with serve_llm(spaced_llm, max_logprobs=-1) as running:
        yield running


def ok(reply: Any) -> Any:
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    assert choice["finish_reason"] in {"stop", "tool_calls"}
    return choice


@pytest.mark.parametrize("seed", range(3))
def test_forms_of_response_format_are_followed(spaced: Any, seed: int) -> None:
    forms: list[tuple[dict[str, Any], set[str]]] = [
        ({"type": "choice", "choice": ["the model", "a row"]}, {"the model", "a row"}),
        ({"type": "regex", "regex": "the model of [ab]"}, {"the model of a", "the model of b"}),
        ({"type": "ebnf", "ebnf": 'start: "the" (" model" | " row")'}, {"the model", "the row"}),
    ]
    for form, texts in forms:
        asked = {"max_tokens": 40, "seed": seed, "response_format": form}
        assert ok(spaced.post(CHAT, messages=[ASK], **asked))["message"]["content"] in texts
        assert ok(spaced.post(COMPLETIONS, prompt="the row", **asked))["text"] in texts


def test_a_schema_is_followed_and_each_member_has_its_probability(spaced: Any) -> None:
    asked = {"messages": [ASK], "max_tokens": 60, "seed": 1, "response_format": JSON_SCHEMA}
    choice = ok(spaced.post(CHAT, **asked, logprobs=True, logprobs_mode="both", field_logprobs="members"))
    said = json.loads(choice["message"]["content"])
    assert said.keys() == {"kind", "is_old"}
    fields = {field["pointer"]: field for field in choice["fields"]}
    for name, values in {"/kind": ["cat", "dog"], "/is_old": [False, True]}.items():
        members = fields[name]["members"]
        assert sorted(member["value"] for member in members) == values
        assert sum(member["grammar_share"] for member in members) == pytest.approx(1, abs=1e-9)


def test_json_object_is_followed(spaced: Any) -> None:
    asked = {"messages": [ASK], "max_tokens": 20, "seed": 1, "response_format": {"type": "json_object"}}
    reply = spaced.post(CHAT, **asked)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_tool_is_called_where_tool_choice_asks_for_one(spaced: Any, choice: Any) -> None:
    asked = {"messages": [ASK], "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    message = ok(spaced.post(CHAT, **asked, max_tokens=200, seed=1, temperature=0.1))["message"]
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]).keys() == {"kind", "is_old"}
