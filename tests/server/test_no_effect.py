"""Fields without effect on results are accepted and named in a header and the log; others are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from logprobe.ignored_kwargs import FIELDS_WITHOUT_EFFECT
from logprobe.server.http.gate import FACTS
from logprobe.server.openai.bodies import ChatBody, CompletionBody, ResponsesBody
from logprobe.server.openai.ignored_fields import warning

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES: Any = [{"role": "user", "content": "the cat"}]
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    CHAT: (ChatBody, {"messages": MESSAGES, "max_tokens": 3, "seed": 1}),
    COMPLETIONS: (CompletionBody, {"prompt": "the cat", "max_tokens": 3, "seed": 1}),
    RESPONSES: (ResponsesBody, {"input": "the cat", "max_output_tokens": 3, "seed": 1}),
}
SCHEMA = {"type": "object", "properties": {"cat": {"enum": ["a", "b"]}}, "required": ["cat"]}
TOOL = {"name": "look", "parameters": {"type": "object"}}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a dog"}]}
TALK: Any = [*MESSAGES, {"role": "assistant", "content": "a"}, *MESSAGES]
FORMS = {"json": SCHEMA, "regex": "(the|and) dog", "choice": ["a dog"], "grammar": 'start: "cat" | "dog"'}
GIVEN: dict[str, dict[str, Any]] = {
    "user": {"user": 'Ann "\\\r\n\u20ac'},
    "safety_identifier": {"safety_identifier": "Ann"},
    "metadata": {"metadata": {"a": "b"}},
    "store": {"store": True},
    "prompt_cache_key": {"prompt_cache_key": "a"},
    "prompt_cache_options": {"prompt_cache_options": {"mode": "implicit"}},
    "prompt_cache_retention": {"prompt_cache_retention": "24h"},
    "parallel_tool_calls": {"parallel_tool_calls": True},
    "stream_options.include_obfuscation": {"stream_options": {"include_obfuscation": True}},
    "priority": {"priority": 3},
    "cache_prompt": {"cache_prompt": False},
    "guided_decoding_backend": {"guided_decoding_backend": "xgrammar"},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "top_logprobs": {"logprobs": False, "top_logprobs": 0},
    "reasoning.summary": {"reasoning": {"summary": "auto"}},
    "reasoning.generate_summary": {"reasoning": {"generate_summary": "auto"}},
    "include.reasoning.encrypted_content": {"include": ["reasoning.encrypted_content"]},
    "reasoning_effort": {"reasoning_effort": "none"},
    "reasoning.effort": {"reasoning": {"effort": "high"}},
    "enable_thinking": {"enable_thinking": False},
    "chat_template_kwargs.enable_thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    "messages.reasoning_content": {
        "messages": [MESSAGES[0], TALK[1] | {"reasoning_content": "a"}, MESSAGES[0]]
    },
    "input.reasoning": {"input": [TALK[0], THOUGHT, *TALK[1:]]},
    "tools.strict": {"tools": [{"type": "function", "strict": True, **TOOL}]},
    "tools.function.strict": {"tools": [{"type": "function", "function": TOOL | {"strict": True}}]},
}
GIVEN |= {
    f"guided_{form}": {f"guided_{form}": value, "structured_outputs": {form: value}}
    for form, value in FORMS.items()
}
# Fields that must accompany a nested field.
BESIDE: dict[str, dict[str, Any]] = {
    "messages.reasoning_content": {"messages": TALK},
    "input.reasoning": {"input": TALK},
    "tools.strict": {"tools": [{"type": "function", **TOOL}]},
    "tools.function.strict": {"tools": [{"type": "function", "function": TOOL}]},
}
EFFECTS = {(RESPONSES, "metadata"), (RESPONSES, "store")}
WARNING = re.compile(r'299 - "[ !#-\[\]-~]+"')  # RFC 7234, section 5.5, without characters that need escaping


def has_fields(path: str, name: str) -> bool:
    only = {"top_logprobs": CHAT, "tools.function.strict": CHAT, "tools.strict": RESPONSES}
    return name.partition(".")[0] in BODIES[path][0].__struct_fields__ and path == only.get(name, path)


ASKED = [(path, name) for path in BODIES for name in FIELDS_WITHOUT_EFFECT if has_fields(path, name)]


@pytest.fixture(scope="module")
def server(long_llm: Any, serve_llm: Any) -> Any:
    """A model with a context long enough for tools, whose chat template ignores reasoning."""
    with serve_llm(long_llm) as running:
        yield running


def told(reply: Any) -> list[str]:
    return [value for name, value in reply.headers.multi_items() if name == "warning"]


def said(reply: Any) -> Any:
    assert reply.status_code == 200, reply.text
    found = reply.json()
    return found["output"][0]["content"] if "output" in found else found["choices"]


def test_every_field_of_the_table_is_one_of_a_body() -> None:
    assert FIELDS_WITHOUT_EFFECT.keys() == GIVEN.keys() == {name for _, name in ASKED}


@pytest.mark.parametrize("name", FIELDS_WITHOUT_EFFECT)
def test_a_warning_is_a_quoted_text_that_begins_with_the_field(name: str) -> None:
    assert WARNING.fullmatch(warning(name))
    assert warning(name).startswith(f'299 - "{name} has no effect: ')


@pytest.mark.parametrize(("path", "name"), ASKED)
def test_a_field_that_changes_nothing_is_named_and_changes_nothing(server: Any, path: str, name: str) -> None:
    body, fields = BODIES[path][1], GIVEN[name]
    if "stream_options" in fields:
        fields = fields | {"stream": True}
    root = name.partition(".")[0]
    without = {one: value for one, value in fields.items() if one != root} | BESIDE.get(name, {})
    plain, reply = (server.post(path, **body | given) for given in (without, fields))
    assert told(plain) == []
    if (path, name) in EFFECTS:
        assert told(reply) == []
    else:
        assert told(reply) == [warning(name)]
    if "stream" not in fields:
        assert said(reply) == said(plain)
    assert reply.status_code == plain.status_code == 200


def test_each_field_has_its_own_warning_and_one_line_of_the_log(
    new_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "logprobe.server")
    words = "a-text-of-the-client"
    body = BODIES[CHAT][1] | {"user": words, "store": False, "metadata": {words: words}}
    with new_server() as server:
        for is_stream in (False, True, False):
            reply = server.post(CHAT, **body, stream=is_stream)
            assert told(reply) == [warning(name) for name in ("user", "metadata", "store")]
            assert words not in str(reply.headers)
        server.post(COMPLETIONS, **BODIES[COMPLETIONS][1], user=words)
    assert sorted(message.split()[0] for message in caplog.messages) == ["metadata", "store", "user"]
    assert all(" has no effect: " in message for message in caplog.messages)
    assert words not in caplog.text


def test_a_request_that_is_refused_is_told_too(server: Any) -> None:
    reply = server.post(CHAT, **BODIES[CHAT][1] | {"user": "Ann", "top_p": 9})
    assert reply.status_code == 400
    assert told(reply) == [warning("user")]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"top_logprobs": 0}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"user": "Ann", "users": "Ann"}, "users"),
        (COMPLETIONS, {"cache_prompts": True}, "cache_prompts"),
        (RESPONSES, {"guided_regex": "a"}, "guided_regex"),
        ("/v1/loglikelihood", {"context": "a", "continuations": ["b"], "seed": 1}, "seed"),
    ],
)
def test_what_could_mean_something_is_refused(
    server: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = server.post(path, **BODIES.get(path, (None, {}))[1] | fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_the_capabilities_name_those_that_never_mean_anything(server: Any) -> None:
    found = server.get("/v1/capabilities").json()["fields_without_effect"]
    assert set(found) < set(FIELDS_WITHOUT_EFFECT)
    assert {"user", "guided_decoding_backend"} <= set(found)
    assert not {"top_logprobs", "guided_json"} & set(found)
    assert "without_effect" not in FACTS
