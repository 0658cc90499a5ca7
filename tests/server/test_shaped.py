"""`response_format` (on each route, streamed or not) and `logit_bias` over HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

MESSAGES: Any = [{"role": "user", "content": "the cat and the dog"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
SEEDS = range(4)


def model_of(client: Any) -> str:
    return client.models.list().data[0].id  # type: ignore[no-any-return]


def chat(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": model_of(client), "messages": MESSAGES, "max_tokens": 80} | options
    )


def text_of(chunks: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def biased(server: Any, **nats: float) -> dict[str, float]:
    """Return a `logit_bias` for the texts of tokens."""
    ids = {
        name: server.llm.text.encode(text, add_special_tokens=False).tolist()
        for name, text in {"quote": '"', "close": "}", "dog": "dog", "cat": "cat"}.items()
    }
    assert all(len(one) == 1 for one in ids.values())
    return {str(ids[name][0]): value for name, value in nats.items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chat_of_a_schema_validates_whole_and_streamed(client: Any, seed: int) -> None:
    whole = chat(client, response_format=AS_PERSON, seed=seed).choices[0]
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content), PERSON)
    assert text_of(chat(client, response_format=AS_PERSON, seed=seed, stream=True)) == whole.message.content


def test_a_chat_that_asks_for_any_object_parses_whole_and_streamed(client: Any, server: Any) -> None:
    asked = {"response_format": {"type": "json_object"}, "logit_bias": biased(server, close=2, quote=10)}
    seen = set()
    for seed in SEEDS:
        whole = chat(client, seed=seed, **asked).choices[0]
        assert whole.finish_reason == "stop"
        assert isinstance(json.loads(whole.message.content), dict)
        assert text_of(chat(client, seed=seed, stream=True, **asked)) == whole.message.content
        seen.add(whole.message.content)
    assert len(seen) > 1, "the bias left nothing to the draw"


def test_plain_text_is_what_comes_without_a_form(client: Any) -> None:
    free = chat(client, seed=1, max_tokens=8).choices[0].message.content
    assert (
        chat(client, seed=1, max_tokens=8, response_format={"type": "text"}).choices[0].message.content
        == free
    )


def test_a_completion_validates_whole_and_streamed(client: Any) -> None:
    asked = {
        "model": model_of(client),
        "prompt": ["the cat", "a dog"],
        "max_tokens": 80,
        "seed": 2,
        "extra_body": {"response_format": AS_PERSON},
    }
    whole = [choice.text for choice in client.completions.create(**asked).choices]
    parts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == whole
    for text in whole:
        jsonschema.validate(json.loads(text), PERSON)


def test_a_response_validates_whole_and_streamed(client: Any) -> None:
    form: Any = {"type": "json_schema", "name": "person", "schema": PERSON}
    asked = {
        "model": model_of(client),
        "input": "the cat",
        "max_output_tokens": 80,
        "text": {"format": form},
        "extra_body": {"seed": 3},
    }
    whole = client.responses.create(**asked)
    jsonschema.validate(json.loads(whole.output_text), PERSON)
    events = list(client.responses.create(**asked, stream=True))
    assert (
        "".join(one.delta for one in events if one.type == "response.output_text.delta") == whole.output_text
    )


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "regex", "regex": "[a-c]{3,5}x"}, "[a-c]{3,5}x"),
        ({"type": "choice", "choice": ["yes", "no"]}, "yes|no"),
    ],
)
def test_forms_beyond_openais_hold_too(server: Any, form: dict[str, Any], pattern: str) -> None:
    reply = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=20, response_format=form)
    assert re.fullmatch(pattern, reply.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    "form",
    [
        {"type": "nonsense"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}},
        {"type": "regex", "regex": "("},
    ],
)
def test_a_form_that_cannot_be_read_is_refused_by_field(server: Any, form: dict[str, Any]) -> None:
    reply = server.post("/v1/chat/completions", messages=MESSAGES, response_format=form)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "response_format"
    reply = server.post("/v1/responses", input="a", text={"format": form})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "text"


def test_a_forced_token_is_the_only_one_drawn_and_a_banned_one_never_is(client: Any, server: Any) -> None:
    forced = biased(server, dog=100)
    assert chat(client, logit_bias=forced, max_tokens=4, seed=1).choices[0].message.content == "dog" * 4
    greedy = chat(client, max_tokens=1, temperature=0, logprobs=True).choices[0].logprobs.content[0]
    (best,) = [place for place, data in enumerate(_vocabulary(server)) if data == bytes(greedy.bytes)]
    banned = chat(client, logit_bias={str(best): -100}, max_tokens=1, n=20, seed=1, logprobs=True)
    assert all(choice.logprobs.content[0].bytes != greedy.bytes for choice in banned.choices)
    # Reported log-probabilities are the model's own: the banned token is still the likeliest.
    rows = chat(client, logit_bias={str(best): -100}, max_tokens=1, logprobs=True, top_logprobs=1)
    assert rows.choices[0].logprobs.content[0].top_logprobs[0].logprob == greedy.logprob


def test_the_bias_of_a_completion_reaches_its_draws(client: Any, server: Any) -> None:
    forced = biased(server, cat=100)
    reply = client.completions.create(
        model=model_of(client), prompt="the dog", max_tokens=3, logit_bias=forced, n=2
    )
    assert [choice.text for choice in reply.choices] == ["cat" * 3] * 2


@pytest.mark.parametrize("bias", [{"99999": 1}, {"dog": 1}, {"5": 1e39}])
def test_a_bias_that_cannot_be_is_refused_by_field(server: Any, bias: dict[str, float]) -> None:
    reply = server.post("/v1/chat/completions", messages=MESSAGES, logit_bias=bias)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "logit_bias"


def _vocabulary(server: Any) -> list[bytes]:
    return [server.llm.text.vocabulary.token_bytes(place) for place in range(server.service.vocab_size)]
