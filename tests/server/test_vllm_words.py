"""What vLLM's clients send: served as what OpenAI's words or ours say, or answered with these."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from logprobe import SamplingParams
from logprobe.errors import UnknownParameterError

if TYPE_CHECKING:
    import openai

SCHEMA: Any = {"type": "object", "properties": {"cat": {"enum": ["a", "b"]}}, "required": ["cat"]}
FORMS: Any = [
    ("json", SCHEMA, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    ("regex", "(the|and) dog", {"type": "regex", "regex": "(the|and) dog"}),
    ("choice", ["the cat", "a dog"], {"type": "choice", "choice": ["the cat", "a dog"]}),
    ("grammar", 'start: "cat" | "dog"', {"type": "ebnf", "ebnf": 'start: "cat" | "dog"'}),
]


def text_of(server: Any, path: str, **body: Any) -> str:
    asked = (
        {"messages": [{"role": "user", "content": "the cat"}]} if "chat" in path else {"prompt": "the cat"}
    )
    reply = server.post(path, **asked, seed=3, max_tokens=24, **body)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    text: str = choice["message"]["content"] if "chat" in path else choice["text"]
    return text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("form", "value", "response_format"), FORMS)
def test_the_form_of_a_text_is_asked_for_in_vllms_words(
    server: Any, path: str, form: str, value: Any, response_format: Any
) -> None:
    expected = text_of(server, path, response_format=response_format)
    assert text_of(server, path, **{f"guided_{form}": value}) == expected
    assert text_of(server, path, structured_outputs={form: value, "json_object": None}) == expected


def test_a_schema_may_come_as_its_text(server: Any) -> None:
    path, schema = "/v1/completions", json.dumps(SCHEMA)
    assert text_of(server, path, guided_json=schema) == text_of(server, path, guided_json=SCHEMA)


def test_openais_client_sends_them_as_vllm_documents_it(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "the cat"}],
        extra_body={"structured_outputs": {"choice": ["the dog"]}},
    )
    assert reply.choices[0].message.content == "the dog"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json", "guided_regex both"),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, "guided_regex", "response_format both"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "json_object"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "Lark's notation"),
        ({"guided_regex": "("}, "guided_regex", "cannot be used"),
        ({"guided_choice": []}, "guided_choice", "length"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "did you mean 'logits_processors_args'?"),
        ({"max_new_tokens": 3}, "max_new_tokens", "did you mean 'max_tokens'?"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids", "'return_token_ids'"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "is no field"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "not supported"),
        (
            {"guided_regex": "a", "structured_outputs": {"regex": "b"}},
            "guided_regex",
            "structured_outputs.regex both",
        ),
        (
            {"guided_regex": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.regex",
            "structured_outputs.choice both",
        ),
    ],
)
def test_what_is_not_served_is_answered_with_what_is(
    server: Any, body: dict[str, Any], param: str, says: str
) -> None:
    reply = server.post("/v1/completions", prompt="the cat", max_tokens=1, **body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("structured_outputs", "response_format"),
        ("extra_args", "logits_processors_args"),
        ("max_new_tokens", "max_tokens"),
        ("lora_request", "lora"),
    ],
)
def test_other_libraries_names_are_answered_with_ours_in_python(name: str, own: str) -> None:
    with pytest.raises(UnknownParameterError, match=f"did you mean '{own}'"):
        SamplingParams(**{name: None})


def test_the_capabilities_say_how_far_logprobs_go(capped_server: Any, server: Any) -> None:
    told = capped_server.get("/v1/capabilities").json()["max_logprobs_of"]
    assert told["completions logprobs"] == told["chat/completions top_logprobs"] == 20
    assert capped_server.post("/v1/completions", prompt="a", max_tokens=1, logprobs=20).status_code == 200
    beyond = capped_server.post("/v1/completions", prompt="a", max_tokens=1, logprobs=21)
    assert "0..20 (max_logprobs)" in beyond.json()["error"]["message"]
    assert server.get("/v1/capabilities").json()["max_logprobs_of"]["completions logprobs"] == -1
