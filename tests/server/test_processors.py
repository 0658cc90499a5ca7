"""Registered processors over HTTP: arguments in the body, the list, and failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from logprobe import LLM

if TYPE_CHECKING:
    from collections.abc import Iterator

PROCESSORS = (
    "ThinkingBudgetLogitsProcessor",
    "say_it_again:SayItAgainLogitsProcessor",
    "LogitBiasLogitsProcessor",
)
MESSAGES: Any = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def processing(tiny_model_folder: Path, serve_llm: Any) -> Iterator[Any]:
    """A server started with a built-in processor by name and a class by import path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
        with (
            LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20, logits_processors=PROCESSORS) as llm,
            serve_llm(llm, PROCESSORS) as running,
        ):
            yield running


def complete(server: Any, **args: Any) -> Any:
    client = server.client()
    return client.completions.create(
        model=server.service.model_name,
        prompt="the cat",
        max_tokens=6,
        seed=1,
        logprobs=0,
        extra_body={"logits_processors_args": args, "return_token_ids": True},
    ).choices[0]


def test_arguments_in_the_body_reach_a_processor_given_by_its_place(processing: Any) -> None:
    prompt = set(processing.llm.text.encode("the cat").tolist())
    plain, again = complete(processing), complete(processing, again_bias=100.0)
    assert not set(plain.token_ids) <= prompt
    assert set(again.token_ids) <= prompt


def test_arguments_in_the_body_reach_a_built_in_given_by_name(processing: Any) -> None:
    assert complete(processing, logit_bias={"9": 100.0}).token_ids == [9] * 6


def test_chat_responses_and_streams_take_arguments_too(processing: Any) -> None:
    client, name = processing.client(), processing.service.model_name
    args = {"logits_processors_args": {"logit_bias": {"9": 100.0}}}
    text = processing.llm.text.vocabulary.token_text(9) * 3
    asked = {"model": name, "messages": MESSAGES, "max_tokens": 3, "extra_body": args}
    assert client.chat.completions.create(**asked).choices[0].message.content == text
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    reply = client.responses.create(model=name, input="the cat", max_output_tokens=16, extra_body=args)
    assert reply.output_text == processing.llm.text.vocabulary.token_text(9) * 16


def test_a_request_without_arguments_gets_the_numbers_of_a_server_without_processors(
    processing: Any, server: Any
) -> None:
    asked = {"prompt": "the cat", "max_tokens": 6, "seed": 1, "logprobs": 2}
    with_them = processing.post("/v1/completions", **asked).json()["choices"]
    without = server.post("/v1/completions", **asked).json()["choices"]
    assert with_them[0]["text"] == without[0]["text"]
    assert with_them[0]["logprobs"]["token_logprobs"] == pytest.approx(
        without[0]["logprobs"]["token_logprobs"], abs=2e-5
    )


@pytest.mark.parametrize(
    "args",
    [
        {"again_bias": "much"},
        {"no_such_argument": 1},
        {"logit_bias": {"99999": 1.0}},
        {"logit_bias": 5},
        {"thinking_budget": -1},
    ],
)
def test_arguments_that_cannot_be_are_a_400_that_names_the_field(
    processing: Any, args: dict[str, Any]
) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "the cat"}),
        ("/v1/responses", {"input": "the cat"}),
    ):
        reply = processing.post(path, **body, logits_processors_args=args)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "logits_processors_args"), error
        assert next(iter(args)) in error["message"]
    with pytest.raises(openai.BadRequestError, match=next(iter(args))):
        complete(processing, **args)


def test_an_argument_of_a_processor_that_was_not_registered_is_refused(server: Any) -> None:
    reply = server.post("/v1/completions", prompt="the cat", logits_processors_args={"again_bias": 1.0})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "logits_processors_args"


def test_the_list_tells_what_is_registered_in_order_then_what_could_be(processing: Any) -> None:
    found = processing.get("/v1/logits_processors").json()["data"]
    registered = [one for one in found if one["registered"]]
    names = [name.rpartition(":")[2] for name in PROCESSORS]
    assert [one["name"] for one in registered] == names
    assert found[: len(names)] == registered
    assert registered[1]["args"]["properties"]["again_bias"]["type"] == "number"
    assert registered[1]["doc"] == "Adds `again_bias` to the logit of every token of the prompt."
    rest = {one["name"] for one in found[len(names) :]}
    assert "PenaltiesLogitsProcessor" in rest
    assert rest.isdisjoint(names)


def test_explain_tells_what_a_registered_processor_did(processing: Any) -> None:
    reply = processing.post(
        "/v1/completions",
        prompt="the cat",
        max_tokens=1,
        logprobs=2,
        explain=True,
        logits_processors_args={"again_bias": 2.0},
    ).json()
    ((effect,),) = reply["choices"][0]["explain"]
    assert effect["processor"] == "SayItAgainLogitsProcessor"
    assert 0 < effect["mass_moved"] <= 1


def test_metrics_count_a_registered_processors_rows(processing: Any) -> None:
    complete(processing, again_bias=1.0)
    line = next(
        one
        for one in processing.get("/metrics").text.splitlines()
        if one.startswith('logprobe_processor_rows_total{processor="SayItAgainLogitsProcessor"}')
    )
    assert float(line.split()[-1]) >= 6


CHOICE = {"type": "choice", "choice": ["cat", "cow"]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allowed_token_ids": [5], "bad_words_of": 5}, ["allowed_token_ids", "bad_words"]),
        ({"min_tokens": 5, "response_format": CHOICE}, ["min_tokens", "response_format"]),
        ({"min_tokens": 5, "guided_choice": ["cat", "cow"]}, ["min_tokens", "guided_choice"]),
        ({"allowed_token_ids": [5], "response_format": CHOICE}, ["allowed_token_ids", "response_format"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_contradict_each_other_are_a_400_that_names_them(
    server: Any, fields: dict[str, Any], named: list[str], stream: bool
) -> None:
    fields = dict(fields)
    if (token_id := fields.pop("bad_words_of", None)) is not None:
        fields["bad_words"] = [server.llm.text.vocabulary.token_text(token_id)]
    reply = server.post("/v1/completions", prompt="the", max_tokens=8, stream=stream, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, named[0])
    assert all(name in error["message"] for name in named)


def test_a_contradiction_met_while_generating_is_a_400_too(server: Any) -> None:
    (token_id,) = server.llm.text.encode("cat", add_special_tokens=False).tolist()
    fields = {"min_tokens": 3, "logit_bias": {str(token_id): 100.0}, "response_format": CHOICE}
    asked = {"prompt": "the", "max_tokens": 8, "temperature": 0, **fields}
    reply = server.post("/v1/completions", **asked)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == "min_tokens"
    assert "GrammarLogitsProcessor" in error["message"]
    streamed = server.post("/v1/completions", **asked, stream=True)
    last = [line for line in streamed.text.splitlines() if line.startswith("data: {")][-1]
    assert json.loads(last.removeprefix("data: "))["error"] == error
