"""`field_logprobs`: log-probabilities of each value of a JSON reply, streamed or not."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from logprobe import LLM, SamplingParams
from logprobe.records.forms.finite import finite
from logprobe.server.openai.schemas import ChatCompletion, Completion, Response
from logprobe.server.service import Service
from logprobe.testing import check_integrity, failing_steps, holding_steps, open_requests
from server_process import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from logprobe.analysis.members import FieldDistribution

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
    """Return the choices of all events of a stream."""
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


# -- alternatives to a value --------------------------------------------------------------------------------

OPEN = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["on", "off", "the"]},
        "is": {"type": "boolean"},
        "note": {"type": "string", "maxLength": 2},
        "big": {"enum": [1e30, 2]},
    },
    "required": ["mood", "is", "note", "big"],
    "additionalProperties": False,
}
MEMBERS = ASK | {
    "field_logprobs": "members",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OPEN}},
}
MEMBERS_WAYS: dict[str, dict[str, Any]] = {path: way | MEMBERS for path, way in WAYS.items()} | {
    "/v1/responses": {
        "input": "the cat",
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 100,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": OPEN}},
        **{name: MEMBERS[name] for name in ("temperature", "seed", "field_logprobs", "logprobs_mode")},
    }
}
TOLERANCE = 1e-4
"""Nats; bits depend on the batch and on the order of paths."""


def told(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the fields of each choice of a reply that is not streamed."""
    reply = server.post(path, **body)
    assert reply.status_code == 200, reply.text
    return parts_of(reply.json())


def parts_of(reply: dict[str, Any]) -> list[Any]:
    if "output" in reply:
        return [part["fields"] for item in reply["output"] for part in item["content"]]
    return [choice["fields"] for choice in reply["choices"]]


def told_in_stream(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    if path != "/v1/responses":
        choices = [one for one in streamed(server, path, body) if "fields" in one]
        return [one["fields"] for one in sorted(choices, key=lambda one: one["index"])]
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=PATIENCE_S) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    assert events[-1]["type"] == "response.completed"
    [done] = [event["part"] for event in events if event["type"] == "response.content_part.done"]
    assert parts_of(events[-1]["response"]) == [done["fields"]]
    return [done["fields"]]


def assert_close(fields: Any, others: Any) -> None:
    """Assert equality up to the last bits of numbers."""
    if isinstance(fields, list):
        assert len(fields) == len(others)
        for one, other in zip(fields, others, strict=True):
            assert_close(one, other)
    elif isinstance(fields, dict):
        assert fields.keys() == others.keys()
        for name, value in fields.items():
            assert_close(value, others[name])
    elif isinstance(fields, float):
        assert fields == pytest.approx(others, abs=TOLERANCE)
    else:
        assert fields == others


def in_library(server: Any, body: dict[str, Any], text: str) -> list[FieldDistribution]:
    """Return the result of `llm.field_distributions` for a server's reply to a completion."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": OPEN}}
    params = SamplingParams(
        max_tokens=100,
        temperature=1,
        seed=body["seed"],
        logprobs=0,
        logprobs_mode="both",
        response_format=form,
    )
    [output] = server.llm.generate([body["prompt"]], params)
    assert output.outputs[0].text == text
    fields: list[FieldDistribution] = server.llm.field_distributions(output)
    return fields


def test_members_are_those_of_the_library(server: Any) -> None:
    body = MEMBERS_WAYS["/v1/completions"]
    choice = server.post("/v1/completions", **body).json()["choices"][0]
    expected = in_library(server, body, choice["text"])
    assert [field["pointer"] for field in choice["fields"]] == [one.pointer for one in expected]
    for field, one in zip(choice["fields"], expected, strict=True):
        assert one.processed is not None
        assert field["logprob"] == pytest.approx(one.raw.logprob, abs=TOLERANCE)
        assert field["upper"] == pytest.approx(one.raw.upper, abs=TOLERANCE)
        assert field["processed_logprob"] == pytest.approx(one.processed.logprob, abs=TOLERANCE)
        if one.members is None or one.grammar_members is None:
            assert field["members"] is None
            assert field["runner_up"] is None
            assert "rest" not in field
            continue
        members = field["members"]
        assert [member["value"] for member in members] == list(one.members.values)
        for name, numbers in (
            ("logprob", one.members.logprobs),
            ("share", one.members.shares),
            ("grammar_logprob", one.grammar_members.logprobs),
            ("grammar_share", one.grammar_members.shares),
        ):
            found = [member[name] for member in members]
            assert found == pytest.approx(finite(numbers), abs=TOLERANCE)
        assert sum(member["share"] for member in members) == pytest.approx(1)
        assert field["rest"] == pytest.approx(one.members.rest, abs=TOLERANCE)
        assert field["unresolved"] == pytest.approx(one.members.unresolved, abs=1e-6)
        assert field["grammar_unresolved"] == pytest.approx(0, abs=1e-6)
        assert one.runner_up is not None
        value, share = one.runner_up
        assert field["runner_up"] == {"value": value, "share": pytest.approx(share, abs=TOLERANCE)}
    named = {field["pointer"] for field in choice["fields"] if field["members"] is not None}
    assert named == {"/mood", "/is", "/big"}


@pytest.mark.parametrize("path", MEMBERS_WAYS)
def test_members_are_the_same_whole_and_streamed(server: Any, path: str) -> None:
    body = MEMBERS_WAYS[path]
    whole = told(server, path, body)
    assert any(field["members"] for field in whole[0])
    assert_close(told_in_stream(server, path, body), whole)


@pytest.mark.parametrize("path", WAYS)
def test_each_choice_has_its_own(server: Any, path: str) -> None:
    body = MEMBERS_WAYS[path] | {"n": 2, "seed": 1}
    whole = told(server, path, body)
    assert len(whole) == 2
    assert_close(told_in_stream(server, path, body), whole)
    for fields in whole:
        assert {field["pointer"] for field in fields if field["members"]} == {"/mood", "/is", "/big"}


def test_replies_with_members_have_the_published_shapes(server: Any) -> None:
    shapes = {
        "/v1/chat/completions": ChatCompletion,
        "/v1/completions": Completion,
        "/v1/responses": Response,
    }
    for path, shape in shapes.items():
        msgspec.json.decode(server.post(path, **MEMBERS_WAYS[path]).content, type=shape)


@pytest.mark.parametrize("path", WAYS)
def test_a_reply_that_was_cut_has_no_fields(server: Any, path: str) -> None:
    body = MEMBERS_WAYS[path] | {"max_tokens": 3}
    assert told(server, path, body) == [None]
    assert told_in_stream(server, path, body) == [None]


def test_a_schema_that_names_no_values_has_fields_as_without(server: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 1}}, "required": ["a"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}},
    }
    body = MEMBERS_WAYS["/v1/completions"] | {"response_format": form}
    assert told(server, "/v1/completions", body) == told(
        server, "/v1/completions", body | {"field_logprobs": True}
    )


def chain(count: int) -> dict[str, Any]:
    """Make a field with more alternatives than are followed."""
    either = {"anyOf": [{"enum": ["on"]}, {"enum": ["off"]}]}
    return {"type": "object", "properties": {"a": {"allOf": [either] * count}}, "required": ["a"]}


@pytest.mark.parametrize("path", MEMBERS_WAYS)
@pytest.mark.parametrize(
    "form",
    [None, {"type": "json_object"}, {"type": "regex", "regex": "[ab]"}],
    ids=["none", "json_object", "regex"],
)
def test_members_need_a_schema(server: Any, path: str, form: dict[str, Any] | None) -> None:
    name = "text" if path == "/v1/responses" else "response_format"
    given = {"format": form} if form and path == "/v1/responses" else form
    refused(server, path, MEMBERS_WAYS[path] | {name: given}, "json_schema")


def refused(server: Any, path: str, body: dict[str, Any], word: str) -> None:
    reply = server.post(path, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "field_logprobs"
    assert word in error["message"]
    is_open = server.post(path, **body | {"stream": True})
    assert is_open.status_code == 400, "before anything is generated"


def test_members_need_raw_rows_and_a_schema_that_can_be_followed(server: Any) -> None:
    path = "/v1/completions"
    body = MEMBERS_WAYS[path]
    refused(server, path, body | {"logprobs_mode": "processed_logprobs"}, "both")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": chain(12)}}
    refused(server, path, body | {"response_format": form}, "alternatives")
    refused(server, path, body | {"response_format": None, "guided_json": chain(12)}, "alternatives")
    refused(server, path, body | {"logprobs": None, "logprobs_mode": None}, "logprobs")


@pytest.mark.parametrize("form", ["guided_json", "structured_outputs"])
def test_a_schema_in_other_words_serves_as_well(server: Any, form: str) -> None:
    path = "/v1/completions"
    given = {"guided_json": OPEN, "structured_outputs": {"json": OPEN}}[form]
    body = MEMBERS_WAYS[path] | {"response_format": None, form: given}
    assert_close(told(server, path, body), told(server, path, MEMBERS_WAYS[path]))


def test_rows_of_a_reply_are_capped_for_all_of_its_values_and_choices(new_server: Any) -> None:
    path = "/v1/completions"
    body = MEMBERS_WAYS[path] | {"n": 2}
    with new_server(max_field_rows=6) as server:
        before = num_rows(server)
        whole = told(server, path, body)
        assert num_rows(server) - before <= 1 + 6  # plus the reply itself
        for fields in whole:
            named = [field for field in fields if field["members"]]
            assert any(field["unresolved"] > 1e-6 for field in named)
            assert all(0 <= field["unresolved"] <= 1 for field in named)
        assert_close(told_in_stream(server, path, body), whole)
        refused(server, path, body | {"n": 7}, "max_field_rows")


def num_rows(server: Any) -> float:
    """Return the number of engine requests that have ended."""
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("logprobe_requests_total"))


def test_rows_are_counted_before_the_reply_begins(new_server: Any) -> None:
    path = "/v1/completions"
    body = MEMBERS_WAYS[path] | {"max_tokens": 60}
    with new_server(max_tokens_in_flight=500) as server:
        reply = server.post(path, **body)
        assert reply.status_code == 400
        assert "max_tokens_in_flight" in reply.json()["error"]["message"]
        assert server.post(path, **body | {"field_logprobs": True}).status_code == 200
    with new_server(max_tokens_in_flight=500, max_field_rows=200, max_requests=8) as server:
        assert told(server, path, body)
        # The client has the whole reply shortly before the server releases its share.
        eventually(lambda: not any(server.service.limits.in_use().values()), "a share is kept")


def test_usage_is_that_of_the_reply_alone(server: Any) -> None:
    path = "/v1/completions"
    server.post(path, **MEMBERS_WAYS[path])  # from here on the prompt is cached for both
    usages = [
        server.post(path, **MEMBERS_WAYS[path] | {"field_logprobs": asked}).json()["usage"]
        for asked in (True, "members")
    ]
    assert usages[0] == usages[1]


@contextmanager
def before_rows(monkeypatch: Any, act: Callable[[], object]) -> Iterator[threading.Event]:
    """Run `act` once, when a reply first requests rows; yield an event that is set afterwards."""
    done, rows = threading.Event(), Service.rows

    async def acting(self: Service, *asked: Any) -> Any:
        if not done.is_set():
            await asyncio.to_thread(act)
            done.set()
        return await rows(self, *asked)

    with monkeypatch.context() as patch:
        patch.setattr(Service, "rows", acting)
        yield done


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_gives_its_rows_up(
    new_server: Any, monkeypatch: Any, *, is_stream: bool
) -> None:
    path = "/v1/completions"
    data = json.dumps(MEMBERS_WAYS[path] | {"stream": is_stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with new_server() as server, ExitStack() as holds:
        with before_rows(monkeypatch, lambda: holds.enter_context(holding_steps(server.llm))) as began:
            address = (httpx.URL(server.url).host, httpx.URL(server.url).port)
            with socket.create_connection(address, timeout=PATIENCE_S) as link:
                link.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
                assert began.wait(PATIENCE_S)
                eventually(lambda: open_requests(server.llm), "no row was asked for")
            left = server.service.limits.in_use
            eventually(lambda: set(left().values()) == {0}, "its place is kept while a step lasts")
        holds.close()
        eventually(lambda: not open_requests(server.llm), "its rows run on")
        check_integrity(server.llm)


@pytest.mark.parametrize("is_stream", [False, True])
def test_fields_of_weights_that_are_gone_are_an_error(
    tiny_model_folder: Path, serve_llm: Any, monkeypatch: Any, *, is_stream: bool
) -> None:
    path = "/v1/completions"
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20) as llm, serve_llm(llm) as server:
        with before_rows(monkeypatch, lambda: llm.load_weights(str(tiny_model_folder))):
            reply = server.post(path, **MEMBERS_WAYS[path] | {"stream": is_stream})
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if "weights" in line]
        assert reply.status_code == (200 if is_stream else 503)
        assert json.loads(lines[-1])["error"]["code"] == "weights_replaced"
        assert told(server, path, MEMBERS_WAYS[path])


def test_a_row_that_fails_fails_the_reply(new_server: Any, monkeypatch: Any) -> None:
    path = "/v1/completions"
    with new_server() as server, ExitStack() as faults:
        fail = lambda: faults.enter_context(failing_steps(server.llm, RuntimeError("no row")))  # noqa: E731
        with before_rows(monkeypatch, fail):
            reply = server.post(path, **MEMBERS_WAYS[path])
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "engine_error")
        faults.close()
        assert told(server, path, MEMBERS_WAYS[path])


def test_members_are_of_the_lora_weights_that_wrote_the_reply(
    new_server: Any, monkeypatch: Any, adapter_folders: dict[str, Path]
) -> None:
    path = "/v1/completions"
    body = MEMBERS_WAYS[path] | {"temperature": 0}
    with new_server() as server:
        server.llm.add_lora("wide", adapter_folders["wide"])
        try:
            [base], [own] = told(server, path, body), told(server, path, body | {"lora": "wide"})
            numbers = [[member["logprob"] for member in fields[1]["members"]] for fields in (base, own)]
            assert max(abs(one - other) for one, other in zip(*numbers, strict=True)) > 1e-3
            with before_rows(monkeypatch, lambda: server.llm.add_lora("wide", adapter_folders["wide"])):
                reply = server.post(path, **body | {"lora": "wide"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "weights_replaced")
            with before_rows(monkeypatch, lambda: server.llm.remove_lora("wide")):
                reply = server.post(path, **body | {"lora": "wide"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "weights_replaced")
        finally:
            if "wide" in server.llm.list_loras():
                server.llm.remove_lora("wide")
