"""Unknown fields are refused if they would change the reply, otherwise ignored and named."""

from __future__ import annotations

import inspect
import random
import re
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec
import pytest

from logprobe.ignored_kwargs import FOREIGN_FIELDS
from logprobe.server.openai import bodies, ignored_fields
from logprobe.server.openai.bodies import BODIES, NESTED, ChatBody
from logprobe.server.openai.ignored_fields import MAX_NAMED, MAX_UNKNOWN, nearest_spelling, num_edits

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2, "seed": 1},
    COMPLETIONS: {"prompt": "the cat", "max_tokens": 2, "seed": 1},
    RESPONSES: {"input": "the cat", "max_output_tokens": 2, "seed": 1},
    "/v1/loglikelihood": {"context": "a", "continuations": ["b"]},
    "/v1/label": {"input": "a", "labels": ["b", "c"]},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [5, 6]},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [5, 6]},
    "/v1/rerank": {"query": "a", "documents": ["b"], "template": ["", "{query}{document}", ":"]},
    "/v1/next_token_logprobs": {"prompts": ["a"]},
    "/v1/hidden_states": {"prompts": ["a"]},
    "/tokenize": {"prompt": "a"},
}
WARNING = re.compile(r'299 - "unknown fields were ignored: [\w.?, -]+"', re.ASCII)


def warnings(reply: Any) -> list[str]:
    return [value for name, value in reply.headers.multi_items() if name == "warning"]


def ignored(*names: str) -> list[str]:
    return [f'299 - "unknown fields were ignored: {", ".join(names)}"']


def num_ignored(server: Any) -> float:
    [found] = re.findall(r"^logprobe_ignored_fields_total (.*)$", server.get("/metrics").text, re.MULTILINE)
    return float(found)


@pytest.fixture(scope="module")
def strict(tiny_llm: Any, serve_llm: Any) -> Iterator[Any]:
    with serve_llm(tiny_llm, strict_fields=True) as running:
        yield running


@pytest.mark.parametrize("path", ASKED)
def test_an_unknown_field_is_ignored_named_and_counted(server: Any, strict: Any, path: str) -> None:
    further = {"keep_alive": "5m", "cache_salt": "s1", "surely_unknown": {"deep": [1]}}
    plain = server.post(path, **ASKED[path])
    before = num_ignored(server)
    reply = server.post(path, **ASKED[path] | further)
    assert reply.status_code == plain.status_code == 200, reply.text
    assert warnings(plain) == []
    assert warnings(reply) == ignored(*further)
    assert num_ignored(server) - before == len(further)
    refused = strict.post(path, **ASKED[path] | {"keep_alive": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "keep_alive")


def test_a_reply_is_the_same_with_ignored_fields(server: Any) -> None:
    asked = ASKED[COMPLETIONS] | {"logprobs": 3}
    plain, reply = server.post(COMPLETIONS, **asked), server.post(COMPLETIONS, **asked, cache_salt="x")
    assert plain.json()["choices"] == reply.json()["choices"]
    streamed = server.post(COMPLETIONS, **asked, stream=True, cache_salt="x")
    assert warnings(reply) == warnings(streamed) == ignored("cache_salt")


@pytest.mark.parametrize(
    ("path", "name", "near"),
    [
        (CHAT, "temprature", "temperature"),
        (CHAT, "topLogprobs", "top_logprobs"),
        (CHAT, "max_completions_tokens", "max_completion_tokens"),
        (CHAT, "users", "user"),
        (COMPLETIONS, "stopp", "stop"),
        (COMPLETIONS, "max-tokens", "max_tokens"),
        (RESPONSES, "max_output_token", "max_output_tokens"),
        ("/v1/loglikelihood", "continuation", "continuations"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_right_name(
    server: Any, path: str, name: str, near: str
) -> None:
    reply = server.post(path, **ASKED[path] | {name: 1})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == name
    assert f"{near!r}" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "ours"),
    [
        (CHAT, {"repeat_penalty": 1.1}, "repetition_penalty"),
        (RESPONSES, {"truncate_prompt_tokens": 10}, "/tokenize"),
        (CHAT, {"documents": [{"text": "a"}]}, "message"),
        (CHAT, {"think": False}, "enable_thinking"),
        (RESPONSES, {"max_tokens": 5}, "max_output_tokens"),
        (RESPONSES, {"reasoning": {"max_tokens": 5}}, "effort"),
        (COMPLETIONS, {"n_predict": 5}, "max_tokens"),
        (COMPLETIONS, {"max_completion_tokens": 5}, "max_tokens"),
        (COMPLETIONS, {"options": {"temperature": 0}}, "body"),
        (COMPLETIONS, {"mirostat": 2}, "leave it out"),
        (COMPLETIONS, {"tools": []}, CHAT),
        (CHAT, {"echo": True}, COMPLETIONS),
    ],
)
def test_a_field_that_would_change_the_numbers_is_refused_with_our_name(
    server: Any, path: str, field: dict[str, Any], ours: str
) -> None:
    reply = server.post(path, **ASKED[path] | field)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"].partition(".")[0] == next(iter(field))
    assert ours in error["message"]


@pytest.mark.parametrize(
    "field",
    [{"repeat_penalty": 1.0}, {"use_beam_search": False}, {"mirostat": 0}, {"typical_p": 1}, {"grammar": ""}],
)
def test_such_a_field_with_the_value_that_asks_for_nothing_is_ignored(
    server: Any, field: dict[str, Any]
) -> None:
    reply = server.post(COMPLETIONS, **ASKED[COMPLETIONS] | field)
    assert reply.status_code == 200, reply.text
    assert warnings(reply) == ignored(*field)


def test_null_is_not_given(server: Any) -> None:
    reply = server.post(COMPLETIONS, **ASKED[COMPLETIONS], cache_salt=None, repeat_penalty=None)
    assert (reply.status_code, warnings(reply)) == (200, [])


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (
            CHAT,
            {"stream": True, "stream_options": {"continuous_usage": True}},
            "stream_options.continuous_usage",
        ),
        (RESPONSES, {"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ("/v1/rerank", {"documents": ["b", {"text": "a", "id": 1}, {"text": "c", "id": 2}]}, "documents.id"),
    ],
)
def test_an_unknown_field_of_an_object_in_a_body_is_ignored_too(
    server: Any, strict: Any, path: str, fields: dict[str, Any], name: str
) -> None:
    reply = server.post(path, **ASKED[path] | fields)
    assert reply.status_code == 200, reply.text
    assert warnings(reply) == ignored(name)
    assert strict.post(path, **ASKED[path] | fields).status_code == 400


def test_every_object_in_a_body_that_has_a_type_is_known_as_such() -> None:
    structs = {
        kind for _, kind in inspect.getmembers(bodies, inspect.isclass) if issubclass(kind, msgspec.Struct)
    }

    def within(hint: Any) -> set[Any]:
        return ({hint} & structs) | {kind for one in get_args(hint) for kind in within(one)}

    found = {
        (name, kind)
        for body in BODIES.values()
        for name, hint in get_type_hints(body, include_extras=True).items()
        for kind in within(hint)
    }
    assert found == set(NESTED.items())


def test_a_body_is_refused_for_its_known_fields_as_without_unknown_ones(server: Any) -> None:
    reply = server.post(COMPLETIONS, **ASKED[COMPLETIONS], keep_alive=1, temperature="hot")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "temperature")
    reply = server.post(COMPLETIONS, **ASKED[COMPLETIONS], keep_alive=1, top_p=9)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "top_p")
    assert warnings(reply) == ignored("keep_alive")


def test_a_clients_words_are_bounded_and_stay_out_of_metrics_and_the_log(
    new_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "logprobe")
    names = ['x"\r\nSet-Cookie: a', "ünknown", "w" * 10_000, *(f"of_a_client_{n}" for n in range(25))]
    with new_server() as server:
        for name in names:
            reply = server.post(COMPLETIONS, **ASKED[COMPLETIONS], **{name: 1})
            assert reply.status_code == 200, reply.text
            [warning] = warnings(reply)
            assert WARNING.fullmatch(warning)
            assert len(warning) < 200
        reply = server.post(COMPLETIONS, **ASKED[COMPLETIONS], **dict.fromkeys(names, 1))
        assert len(warnings(reply)[0]) < 1000
        assert warnings(reply)[0].endswith(f' and {len(names) - MAX_NAMED} more"')
        assert num_ignored(server) == 2 * len(names)
        figures = server.get("/metrics").text
    assert len(caplog.messages) == 1
    for text in (figures, caplog.text):
        assert "of_a_client" not in text
        assert "Set-Cookie" not in text


def test_more_unknown_fields_than_are_looked_at_are_refused(server: Any) -> None:
    fields = {f"of_a_client_{n}": 1 for n in range(MAX_UNKNOWN + 1)}
    assert server.post(COMPLETIONS, **ASKED[COMPLETIONS], **fields).status_code == 400
    del fields["of_a_client_0"]
    assert server.post(COMPLETIONS, **ASKED[COMPLETIONS], **fields).status_code == 200


def test_a_field_of_many_items_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    remedy_for = ignored_fields.remedy_for

    def noted(path: str, *more: Any) -> str | None:
        looked_at.append(path)
        return remedy_for(path, *more)

    monkeypatch.setattr(ignored_fields, "remedy_for", noted)
    names = [f"of_a_client_{n}" for n in range(MAX_UNKNOWN)]
    body = {"query": "a", "documents": [{"text": "b", **dict.fromkeys(names, 1)}] * 100}
    known, paths = ignored_fields.without_unknown(msgspec.json.encode(body), BODIES["/v1/rerank"])
    assert paths == looked_at == [f"documents.{name}" for name in names]
    assert msgspec.json.decode(known)["documents"] == [{"text": "b"}] * 100


def test_strict_suggestions_for_a_field_of_an_item_are_of_the_item(strict: Any) -> None:
    for name, near in (("txt", "'text'"), ("label", None)):
        documents = [{"text": "a", name: "b"}]
        error = strict.post("/v1/rerank", **ASKED["/v1/rerank"] | {"documents": documents}).json()["error"]
        assert error["param"].endswith(f".{name}")
        assert ("did you mean" in error["message"]) == (near is not None)
        assert near is None or near in error["message"]


def test_many_stop_strings_are_taken_up_to_the_limit(server: Any) -> None:
    limit = server.get("/v1/capabilities").json()["limits"]["max_stop"]
    stops = [f"zz{n}" for n in range(limit)]
    assert limit > 4
    assert server.post(COMPLETIONS, **ASKED[COMPLETIONS], stop=stops).status_code == 200
    reply = server.post(COMPLETIONS, **ASKED[COMPLETIONS], stop=[*stops, "zzz"])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stop")


def test_edits_are_counted_as_the_definition_says() -> None:
    def slow(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        costs = [slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0])]
        if len(a) > 1 and len(b) > 1 and (a[0], a[1]) == (b[1], b[0]):
            costs.append(slow(a[2:], b[2:]) + 1)
        return min(costs)

    draw = random.Random(0)  # noqa: S311 - chooses test inputs
    for _ in range(500):
        a, b = ("".join(draw.choices("abc", k=draw.randrange(6))) for _ in range(2))
        assert num_edits(a, b) == min(slow(a, b), 3), (a, b)


def test_no_field_of_another_server_is_taken_for_a_misspelling_of_what_it_is_not() -> None:
    known = ChatBody.__struct_fields__
    harmless = ("keep_alive", "cache_salt", "ttl", "rid", "session_id", "provider")
    assert [name for name in harmless if nearest_spelling(name, known)] == []
    assert all(nearest_spelling(name, known) == name for name in known)
    fields = {name for body in BODIES.values() for name in body.__struct_fields__}
    nested = {name for body in NESTED.values() for name in body.__struct_fields__}
    assert {own for foreign in FOREIGN_FIELDS.values() for own in foreign.use} <= fields | nested
