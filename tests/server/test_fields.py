"""`field_logprobs`: each value of a JSON reply with its own numbers, whole and streamed."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from server_process import PATIENCE_S

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["on", "off"]},
        "b": {"enum": [1, 2.5, True]},
        "c": {"type": "null"},
        "d": {"const": 1e30},
    },
    "required": ["a", "b", "c", "d"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ASK: dict[str, Any] = {
    "max_tokens": 100,
    "temperature": 1,
    "seed": 3,
    "response_format": FORM,
    "field_logprobs": True,
    "logprobs_mode": "both",
}
WAYS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the cat"}], "logprobs": True},
    "/v1/completions": {"prompt": "the cat", "logprobs": 0},
}


def streamed(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of all events of a stream."""
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=PATIENCE_S) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("path", WAYS)
def test_fields_are_the_rows_of_their_tokens_whole_and_streamed(server: Any, path: str) -> None:
    body = WAYS[path] | ASK
    reply = server.post(path, **body)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    rows, others = rows_of(choice["logprobs"])
    assert choice["fields"] is not None, text
    fields = {field["pointer"]: field for field in choice["fields"]}
    said = json.loads(text)
    assert {name: fields[f"/{name}"]["value"] for name in "abc"} == {name: said[name] for name in "abc"}
    assert "value" not in fields[""]
    assert "value" not in fields["/d"], "no program reads so large an integer as it is"
    for field in fields.values():
        start, stop = field["tokens"]
        if field["pointer"]:
            assert field["logprob"] == pytest.approx(math.fsum(rows[start:stop]), abs=1e-4)
            assert field["processed_logprob"] == pytest.approx(math.fsum(others[start:stop]), abs=1e-4)
        assert field["logprob"] <= field["upper"]
        assert start <= field["least_sure"] < stop
    assert fields[""]["logprob"] == pytest.approx(
        sum(fields[f"/{name}"]["logprob"] for name in said), abs=1e-4
    )
    told = [choice["fields"] for choice in streamed(server, path, body) if "fields" in choice]
    assert told == [choice["fields"]]


def rows_of(logprobs: dict[str, Any]) -> tuple[list[float], list[float]]:
    if "content" in logprobs:
        return tuple([row["logprob"] for row in logprobs[name]] for name in ("content", "processed_content"))  # type: ignore[return-value]
    return logprobs["token_logprobs"], logprobs["processed"]["token_logprobs"]


@pytest.mark.parametrize("path", WAYS)
def test_a_text_that_is_no_whole_json_has_none(server: Any, path: str) -> None:
    body = WAYS[path] | ASK | {"max_tokens": 3}
    assert server.post(path, **body).json()["choices"][0]["fields"] is None
    assert [choice["fields"] for choice in streamed(server, path, body) if "fields" in choice] == [None]


@pytest.mark.parametrize("path", WAYS)
def test_they_come_beside_logprobs(server: Any, path: str) -> None:
    body = WAYS[path] | ASK | {"logprobs": None, "logprobs_mode": None}
    refused = server.post(path, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "field_logprobs")
    assert "fields" not in server.post(path, **body | {"field_logprobs": False}).json()["choices"][0]
