"""Requests as vLLM's clients send them: mapped to OpenAI's or our fields, or refused naming those."""

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
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json", "so does guided_regex;"),
        (
            {"guided_regex": "a", "response_format": {"type": "text"}},
            "guided_regex",
            "so does response_format;",
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "json_object"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "Lark's notation"),
        ({"guided_regex": "("}, "guided_regex", "cannot be used"),
        ({"guided_choice": []}, "guided_choice", "length"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "'logits_processors_args'"),
        ({"max_new_tokens": 3}, "max_new_tokens", "'max_tokens'"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "leave it out"),
        (
            {"guided_regex": "a", "structured_outputs": {"regex": "b"}},
            "guided_regex",
            "so does structured_outputs.regex;",
        ),
        (
            {"guided_regex": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.regex",
            "so does structured_outputs.choice;",
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
    assert "[0, 20] (max_logprobs)" in beyond.json()["error"]["message"]
    assert server.get("/v1/capabilities").json()["max_logprobs_of"]["completions logprobs"] == -1


def test_prompt_logprobs_have_vllms_shape_and_ours_by_name(server: Any) -> None:
    ask = {"prompt": [[5, 60, 7, 9], [5, 60]], "max_tokens": 1, "prompt_logprobs": 2}
    theirs = server.post("/v1/completions", **ask).json()["choices"]
    ours = server.post("/v1/completions", prompt_rows=True, **ask).json()["choices"]
    for one, other in zip(theirs, ours, strict=True):
        assert "prompt_rows" not in one
        assert "prompt_logprobs" not in other
        assert one["prompt_logprobs"][0] is other["prompt_rows"][0] is None
        for position, row in zip(one["prompt_logprobs"][1:], other["prompt_rows"][1:], strict=True):
            entries = [row, *row["top_logprobs"]]
            assert [*position] == [*dict.fromkeys(str(entry["token_id"]) for entry in entries)]
            for entry in entries:
                assert position[str(entry["token_id"])] == {
                    "logprob": pytest.approx(entry["logprob"], abs=1e-5),
                    "rank": entry["rank"],
                    "decoded_token": entry["token"],
                }
    refused = server.post("/v1/completions", prompt="a", prompt_rows=True).json()["error"]
    assert refused["param"] == "prompt_rows"


@pytest.mark.parametrize("is_stream", [False, True])
def test_tokens_come_as_their_ids_where_asked(server: Any, is_stream: bool) -> None:
    shape = {"max_tokens": 5, "seed": 2, "return_token_ids": True, "ignore_eos": True, "n": 2}
    text = shape | {"prompt": "the cat", "logprobs": 2, "echo": True}
    chat = shape | {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 2}
    for path, ask in (("/v1/completions", text), ("/v1/chat/completions", chat)):
        own, by_id = (
            choices_of(server.post(path, **ask, stream=is_stream, return_tokens_as_token_ids=asks))
            for asks in (False, True)
        )
        for plain, one in zip(own, by_id, strict=True):
            assert [one["token_ids"], one["text"]] == [plain["token_ids"], plain["text"]]
            assert one["names"][-5:] == [f"token_id:{token_id}" for token_id in one["token_ids"]]
            assert all(name.startswith("token_id:") for name in one["names"] + one["best"])
            assert one["numbers"] == pytest.approx(plain["numbers"], abs=1e-5)
            assert not any(name.startswith("token_id:") for name in plain["names"])
    (again,) = choices_of(server.post("/v1/completions", prompt="a", max_tokens=1, logprobs=0))
    assert not again["names"][0].startswith("token_id:"), "it holds for one request"


def choices_of(reply: Any) -> list[dict[str, Any]]:
    """Return the token fields of each choice of a reply or stream."""
    assert reply.status_code == 200, reply.text
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    found: dict[int, dict[str, Any]] = {}
    for choice in (one for line in lines or [reply.text] for one in json.loads(line)["choices"]):
        names = ("token_ids", "names", "best", "numbers")
        one = found.setdefault(choice["index"], {"text": ""} | {name: [] for name in names})
        said = choice.get("message", choice.get("delta", choice))
        one["text"] += said.get("text") or said.get("content") or ""
        one["token_ids"] += choice.get("token_ids", [])
        rows = choice["logprobs"] or {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        if "content" in rows:
            one["names"] += [row["token"] for row in rows["content"]]
            one["numbers"] += [row["logprob"] for row in rows["content"]]
            one["best"] += [top["token"] for row in rows["content"] for top in row["top_logprobs"]]
        else:
            one["names"] += rows["tokens"]
            one["numbers"] += [number or 0.0 for number in rows["token_logprobs"]]
            one["best"] += [name for best in rows["top_logprobs"] for name in best or ()]
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("engine", ["own setting", "the server's"])
def test_processed_rows_of_a_prompt_are_at_the_temperature(server: Any, new_server: Any, engine: str) -> None:
    ids, temperature = [5, 60, 61, 70], 0.6
    (score,) = server.llm.score([(ids[:1], ids[1:])], temperature=temperature, logprobs=3)
    (raw,) = server.llm.score([(ids[:1], ids[1:])])
    # Other sampling parameters do not affect prompt log-probabilities.
    ask = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 3, "top_k": 2, "logit_bias": {"70": 5.0}}
    with new_server(logprobs_mode="processed_logprobs") as own:
        for asked, want in ((temperature, score), (1.0, raw), (0.0, raw)):
            mode = {"logprobs_mode": "processed_logprobs"} if engine == "own setting" else {}
            post = server.post if engine == "own setting" else own.post
            [choice] = post("/v1/completions", **ask, temperature=asked, **mode).json()["choices"]
            for position, token_id, logprob in zip(
                choice["prompt_logprobs"][1:], want.token_ids, want.token_logprobs, strict=True
            ):
                assert position[str(token_id)]["logprob"] == pytest.approx(logprob, abs=1e-5)
    assert score.token_logprobs != pytest.approx(raw.token_logprobs, abs=1e-2)


def test_what_trainers_ask_before_they_begin(server: Any, new_server: Any) -> None:
    with new_server(logprobs_mode="processed_logprobs") as own:
        config = own.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["model_config"]["dtype"] == f"torch.{server.service.capabilities.dtype}"
    assert config["weight_transfer_config"] is config["lora_config"] is None
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert server.get("/get_world_size").json() == {"world_size": 1}
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] > 0
