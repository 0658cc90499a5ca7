"""`/v1/loglikelihood`, `/v1/next_token_logprobs`, the tokenizer routes and the informational routes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from logprobe import FlatLogprobs, Logprob, SamplingParams, Score, __version__
from logprobe.cli.app import run
from logprobe.models import Vocabulary
from logprobe.records.forms.finite import finite_fields
from logprobe.server.routes.loglikelihood import fields_of
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT, ANSWERS = "the cat and", [" the dog", " of", "s in the"]


def test_continuations_score_as_offline(server: Any) -> None:
    reply = server.post("/v1/loglikelihood", context=CONTEXT, continuations=ANSWERS).json()
    expected = server.llm.score([(CONTEXT, answer) for answer in ANSWERS])
    for found, score, answer in zip(reply["data"], expected, ANSWERS, strict=True):
        assert found["logprob"] == pytest.approx(score.logprob, abs=1e-4)
        assert found["token_ids"] == score.token_ids
        assert found["token_logprobs"] == pytest.approx(score.token_logprobs, abs=1e-4)
        assert found["is_greedy"] == score.is_greedy
        assert found["num_bytes"] == len(answer.encode())
        assert found["logprob_per_byte"] == pytest.approx(found["logprob"] / found["num_bytes"])
        assert found["mean_logprob"] == pytest.approx(np.mean(found["token_logprobs"]))


def test_python_http_and_the_command_line_give_the_same_score(
    server: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    rows, scored = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    rows.write_text("".join(json.dumps({"context": CONTEXT, "text": answer}) + "\n" for answer in ANSWERS))
    flags = ("--context-column", "context", "--unconditional", "--tokens", "-o", str(scored))
    assert run(("dataset", str(rows), *flags, "--model", str(tiny_model_folder))) == 0
    by_command = [json.loads(line) for line in scored.read_text().splitlines()]
    body = {"context": CONTEXT, "continuations": ANSWERS, "unconditional": True}
    by_http = server.post("/v1/loglikelihood", **body).json()["data"]
    in_python = server.llm.score([(CONTEXT, answer) for answer in ANSWERS], unconditional=True)
    sums = ("logprob", "mean_logprob", "logprob_per_byte", "logprob_per_char", "pmi")
    facts = ("num_tokens", "num_bytes", "is_greedy")
    for score, reply, row in zip(in_python, by_http, by_command, strict=True):
        assert [reply[name] for name in facts] == [getattr(score, name) for name in facts]
        assert [row[name] for name in facts] == [getattr(score, name) for name in facts]
        assert row["token_ids"] == reply["token_ids"] == score.token_ids
        assert row["token_ranks"] == reply["ranks"] == score.ranks
        for name in sums:
            want = getattr(score, name)
            assert reply[name] == pytest.approx(want, abs=5e-5), name
            assert row[name] == pytest.approx(want, abs=5e-5), name
        assert reply["token_logprobs"] == pytest.approx(score.token_logprobs, abs=5e-5)
        assert row["token_logprobs"] == pytest.approx(score.token_logprobs, abs=5e-5)


def test_an_impossible_token_is_minus_infinity_but_in_json() -> None:
    record = FlatLogprobs([None, {5: Logprob(-0.5, 1)}, {6: Logprob(-np.inf, 9)}])
    score = Score.of([5, 6], record, b"ab", unconditional_logprob=-2.0)
    assert (score.logprob, score.token_logprobs) == (-np.inf, [-0.5, -np.inf])
    fields = fields_of(score, Vocabulary([b"x"] * 7))
    told = finite_fields(fields)
    for name in ("logprob", "mean_logprob", "logprob_per_byte", "logprob_per_char", "pmi"):
        assert fields[name] == -np.inf
        assert told[name] == -9999.0
    assert told["token_logprobs"] == [-0.5, -9999.0]
    assert told["ranks"] == [1, 9]


def test_answers_to_a_conversation_follow_its_template(server: Any) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    text = server.llm.text
    laid_out = text.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before = text.encode(laid_out, add_special_tokens=False).tolist()
    reply = server.post("/v1/loglikelihood", messages=messages, continuations=[" of the", " a"]).json()
    for found in reply["data"]:
        ids = found["token_ids"]
        by_ids = server.post("/v1/loglikelihood", context=before, continuations=[ids]).json()["data"][0]
        assert found["logprob"] == pytest.approx(by_ids["logprob"], abs=1e-4)


BEGUN: Any = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the dog an"}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("begun", "continuation", "scored"),
    [
        ("the dog and", " of the cat", " of the cat"),
        ("the dog and ", "of the cat", " of the cat"),  # the space belongs to the first token
        ("the dog and", "\n\n", "\n\n"),
        ("é", "🐈 é", "🐈 é"),
    ],
)
def test_a_message_that_is_gone_on_with_scores_as_its_tokens_by_hand(
    server: Any, begun: str, continuation: str, scored: str
) -> None:
    messages = [BEGUN[0], {"role": "assistant", "content": begun}]
    text = server.llm.text
    ids = text.encode(f"user: the cat\nassistant: {begun}{continuation}", add_special_tokens=False).tolist()
    num = next(count for count in range(1, len(ids)) if text.bytes_of(ids[-count:]) == scored.encode())
    before, after = ids[:-num], ids[-num:]
    rows = as_echo(server, ids)
    for layout in (CONTINUED, {"continue_final_message": True}):
        asked = {"messages": messages, "continuations": [continuation, " a"], "unconditional": True}
        found = server.post("/v1/loglikelihood", **asked, **layout).json()["data"][0]
        by_ids = server.post("/v1/loglikelihood", context=before, continuations=[after], unconditional=True)
        assert found["token_ids"] == after
        assert found["num_bytes"] == len(scored.encode())
        assert found["token_logprobs"] == pytest.approx(rows[-num:], abs=1e-4)
        expected = by_ids.json()["data"][0]
        for name in ("logprob", "logprob_per_byte", "unconditional_logprob", "pmi"):
            assert found[name] == pytest.approx(expected[name], abs=1e-4)


@pytest.mark.parametrize("asked", [{"context": "the dog an"}, {"messages": BEGUN, **CONTINUED}])
def test_a_token_that_spans_the_boundary_is_summed_by_bytes(server: Any, asked: dict[str, Any]) -> None:
    whole = server.post("/v1/loglikelihood", continuations=["d of", "d"], unconditional=True, **asked).json()
    for found in whole["data"]:
        assert found["boundary"] == "bytes"
        assert -20 < found["logprob"] < 0
        assert found["pmi"] == pytest.approx(found["logprob"] - found["unconditional_logprob"], abs=1e-6)
    longer, shorter = whole["data"]
    assert longer["logprob"] < shorter["logprob"]
    assert (longer["num_bytes"], longer["num_tokens"], longer["tokens"]) == (4, 2, [" and", " of"])
    if "context" in asked:
        pairs = [("the dog an", "d of"), ("the dog an", "d")]
        for found, score in zip(whole["data"], server.llm.score(pairs), strict=True):
            assert found["logprob"] == pytest.approx(score.logprob, abs=5e-5)
    cooler = server.post("/v1/loglikelihood", continuations=["d of"], temperature=0.5, **asked).json()[
        "data"
    ][0]
    assert cooler["boundary"] == "bytes"
    assert cooler["logprob"] != pytest.approx(longer["logprob"], abs=1e-3)


def test_lm_evaluation_harness_splits_by_name(server: Any) -> None:
    asked = {"context": "the dog an", "continuations": ["d of"]}
    found = server.post("/v1/loglikelihood", boundary="token", **asked).json()["data"][0]
    (score,) = server.llm.score([("the dog an", "d of")], boundary="token")
    assert (found["boundary"], found["token_ids"]) == ("token", score.token_ids)
    assert found["logprob"] == pytest.approx(score.logprob, abs=5e-5)
    refused = server.post("/v1/loglikelihood", boundary="end", **asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "boundary")


def as_echo(server: Any, ids: list[int]) -> list[float]:
    """Return the log-probabilities of a prompt's tokens by `echo`."""
    asked = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 0}
    reply = server.post("/v1/completions", **asked)
    assert reply.status_code == 200, reply.text
    numbers: list[float] = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
    return numbers


def test_ids_follow_a_message_that_is_gone_on_with(server: Any) -> None:
    before = server.post("/tokenize", messages=BEGUN, **CONTINUED).json()["tokens"]
    found, by_ids = (
        server.post("/v1/loglikelihood", continuations=[[7, 8]], **asked).json()["data"][0]
        for asked in ({"messages": BEGUN, **CONTINUED}, {"context": before})
    )
    assert found["token_logprobs"] == pytest.approx(by_ids["token_logprobs"], abs=1e-4)


def test_what_lays_out_messages_is_refused_without_them(server: Any) -> None:
    for name, value in {**CONTINUED, "tools": [], "chat_template_kwargs": {}}.items():
        reply = server.post("/v1/loglikelihood", context="a", continuations=["b"], **{name: value})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == name
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused = server.post("/v1/loglikelihood", messages=BEGUN, continuations=["b"], **both)
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_pointwise_information_subtracts_the_bare_score(server: Any) -> None:
    reply = server.post(
        "/v1/loglikelihood", context=CONTEXT, continuations=ANSWERS, unconditional=True
    ).json()
    bare = server.post("/v1/loglikelihood", context="", continuations=ANSWERS).json()
    for found, alone in zip(reply["data"], bare["data"], strict=True):
        assert found["pmi"] == pytest.approx(found["logprob"] - alone["logprob"], abs=1e-4)


def test_scores_come_as_arrow_when_asked(server: Any) -> None:
    import pyarrow as pa

    asked = {"context": CONTEXT, "continuations": ANSWERS}
    plain = server.post("/v1/loglikelihood", **asked).json()["data"]
    headers = {"accept": "application/vnd.apache.arrow.stream"}
    reply = httpx.post(f"{server.url}/v1/loglikelihood", json=asked, headers=headers, timeout=PATIENCE_S)
    rows = pa.ipc.open_stream(reply.content).read_all().to_pylist()
    # Two requests: the batch may change the last bit of a float32.
    for row, one in zip(rows, plain, strict=True):
        assert row["token_logprobs"] == pytest.approx(one["token_logprobs"], abs=1e-5)
    assert rows[0].keys() == plain[0].keys() - {"index"}


NAMED = {
    "context": [5, 60],
    "continuations": [[70, 71, 9], [8]],
    "logprob_token_ids": [[[3, 200], [], [7]], [5, 6]],
}


@pytest.mark.parametrize("temperature", [None, 1.7])
def test_own_ids_at_each_position_come_as_offline(server: Any, temperature: float | None) -> None:
    import pyarrow as pa

    from logprobe.records import LogprobsInfo

    asked = NAMED if temperature is None else NAMED | {"temperature": temperature}
    reply = server.post("/v1/loglikelihood", **asked).json()
    pairs = [(NAMED["context"], continuation) for continuation in NAMED["continuations"]]
    expected = server.llm.score(pairs, logprob_token_ids=NAMED["logprob_token_ids"], temperature=temperature)
    headers = {"accept": "application/vnd.apache.arrow.stream"}
    arrow = httpx.post(f"{server.url}/v1/loglikelihood", json=asked, headers=headers, timeout=PATIENCE_S)
    table = pa.ipc.open_stream(arrow.content).read_all()
    for row, told, score in zip(reply["data"], table.to_pylist(), expected, strict=True):
        entries = score.record.given.arrays
        bounds = entries.offsets.tolist()
        spans = [*pairwise(bounds)]
        for one in (row, told):
            assert one["given_ids"] == [entries.token_ids[a:b].tolist() for a, b in spans]
            assert one["given_ranks"] == [entries.ranks[a:b].tolist() for a, b in spans]
            for values, (start, stop) in zip(one["given_logprobs"], spans, strict=True):
                assert values == pytest.approx(entries.logprobs[start:stop], abs=1e-5)
            assert one["token_logprobs"] == pytest.approx(score.token_logprobs, abs=1e-5)
    assert reply.get("logprobs_info", {}).get("temperature") == temperature
    assert LogprobsInfo.from_json(table.schema.metadata[b"logprobe.info"]).temperature == temperature


def test_replies_count_as_logprob_bytes_in_json_and_arrow(server: Any) -> None:
    pytest.importorskip("pyarrow")
    for accept in ("application/json", "application/vnd.apache.arrow.stream"):
        before = server.service.metrics.registry.get_sample_value("logprobe_logprob_bytes_total")
        reply = httpx.post(
            f"{server.url}/v1/loglikelihood",
            json={"context": "a", "continuations": ["b"]},
            headers={"accept": accept},
            timeout=PATIENCE_S,
        )
        after = server.service.metrics.registry.get_sample_value("logprobe_logprob_bytes_total")
        assert reply.headers["content-type"] == accept
        assert after - before == len(reply.content)


def test_arrow_has_named_ids_also_where_the_first_continuation_names_none(server: Any) -> None:
    import pyarrow as pa

    asked = NAMED | {"logprob_token_ids": [[], [5, 6]]}
    headers = {"accept": "application/vnd.apache.arrow.stream"}
    reply = httpx.post(f"{server.url}/v1/loglikelihood", json=asked, headers=headers, timeout=PATIENCE_S)
    rows = pa.ipc.open_stream(reply.content).read_all().to_pylist()
    assert [row["given_ids"] for row in rows] == [[[], [], []], [[5, 6]]]
    data = server.post("/v1/loglikelihood", **asked).json()["data"]
    names = ("given_ids", "given_logprobs", "given_ranks")
    assert [data[0][name] for name in names] == [[[], [], []]] * 3


def test_a_score_at_a_temperature_runs_on_the_lora_that_it_names(server: Any, adapter_folders: Any) -> None:
    server.llm.add_lora("teacher", adapter_folders["wide"])
    try:
        found = server.post("/v1/loglikelihood", **NAMED, temperature=2.0, lora="teacher").json()["data"][0]
        pair = (NAMED["context"], NAMED["continuations"][0])
        (want,) = server.llm.with_lora("teacher").score([pair], temperature=2.0)
    finally:
        server.llm.remove_lora("teacher")
    assert found["token_logprobs"] == pytest.approx(want.token_logprobs, abs=1e-5)


def test_own_ids_at_each_position_of_prompts_and_completions(server: Any) -> None:
    ids = [5, 60, 70]
    body = {"prompt": ids, "max_tokens": 0, "prompt_logprobs": 0, "logprob_token_ids": [[], [3, 200], []]}
    [choice] = server.post("/v1/completions", **body).json()["choices"]
    (score,) = server.llm.score([(ids[:1], ids[1:])], logprob_token_ids=[[[3, 200], []]])
    first, second, third = choice["prompt_given"]
    assert (first, third) == (None, [])
    assert {one["token_id"]: one["rank"] for one in second} == {
        token_id: one.rank for token_id, one in score.record.given[0].items()
    }
    body = {"prompt": ids, "max_tokens": 3, "logprobs": 0, "logprob_token_ids": [[9], [], [8, 7]]}
    [choice] = server.post("/v1/completions", **body, ignore_eos=True).json()["choices"]
    assert [[one["token_id"] for one in row] for row in choice["logprobs"]["given"]] == [[9], [], [8, 7]]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (
            "loglikelihood",
            NAMED | {"logprob_token_ids": [[[3]]]},
            "logprob_token_ids",
            "one list per continuation",
        ),
        (
            "loglikelihood",
            NAMED | {"logprob_token_ids": [[[3]], [5]]},
            "logprob_token_ids",
            "1 lists for a continuation of 3 tokens",
        ),
        (
            "loglikelihood",
            NAMED | {"logprob_token_ids": [[99_999], [5]]},
            "logprob_token_ids",
            "lies outside",
        ),
        (
            "loglikelihood",
            NAMED | {"logprob_token_ids": [[[*range(257)], [], []], []]},
            "logprob_token_ids",
            "max_logprob_token_ids",
        ),
        (
            "loglikelihood",
            NAMED | {"logprob_token_ids": [[*range(257)], []]},
            "logprob_token_ids",
            "max_logprob_token_ids",
        ),
        ("loglikelihood", NAMED | {"logprob_token_ids": [[[]] * 70_000, []]}, None, "max_body_values"),
        ("loglikelihood", NAMED | {"temperature": 0}, "temperature", ""),
        (
            "completions",
            {"prompt": [5], "logprobs": 0, "logprob_token_ids": [[*range(257)]]},
            "logprob_token_ids",
            "max_logprob_token_ids",
        ),
        (
            "completions",
            {"prompt": [[5], [5, 6]], "prompt_logprobs": 0, "logprob_token_ids": [[]]},
            "logprob_token_ids",
            "1 lists for 2 prompt tokens",
        ),
    ],
)
def test_ids_that_cannot_be_are_refused_by_field(
    server: Any, path: str, body: dict[str, Any], param: str | None, said: str
) -> None:
    reply = server.post(f"/v1/{path}", **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert said in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"continuations": ["a"]}, "context"),
        ({"context": "a", "messages": [{"role": "user", "content": "b"}], "continuations": ["a"]}, "context"),
        ({"context": "a", "continuations": []}, "continuations"),
        ({"context": "a", "continuations": [""]}, "continuations"),
        ({"context": "a", "continuations": [[5]]}, "continuations"),
        ({"context": [5], "continuations": [[99999]]}, "continuations"),
    ],
)
def test_a_score_that_cannot_be_is_refused_by_field(server: Any, body: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/loglikelihood", **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_whole_rows_come_in_binary(server: Any, dtype: str) -> None:
    from safetensors.numpy import load

    prompts = ["the cat", server.llm.text.encode("a dog").tolist()]
    reply = server.post("/v1/next_token_logprobs", prompts=prompts, dtype=dtype)
    assert reply.headers["content-type"] == "application/vnd.safetensors"
    table = load(reply.content)["logprobs"]
    assert table.dtype == dtype
    assert table.shape == (2, server.service.vocab_size)
    header = json.loads(reply.content[8 : 8 + int.from_bytes(reply.content[:8], "little")])["__metadata__"]
    assert (header["arithmetic"], header["logprobe_version"]) == ("fma", __version__)
    np.testing.assert_allclose(np.exp(table.astype(np.float64)).sum(axis=1), 1, atol=2e-3)
    for row, prompt in zip(table, ["the cat", "a dog"], strict=True):
        (output,) = server.llm.generate(prompt, SamplingParams(max_tokens=1, logprobs=-1))
        position = output.outputs[0].logprobs[0]
        assert row[5] == pytest.approx(position[5].logprob, abs=2e-2 if dtype == "float16" else 1e-4)


def test_a_whole_row_of_an_unknown_stage_is_refused(server: Any) -> None:
    reply = server.post("/v1/next_token_logprobs", prompts=["a"], stage="processed")
    assert reply.json()["error"]["param"] == "stage"


@pytest.mark.parametrize("root", ["", "/v1"])
def test_the_tokenizer_routes_replace_tokenizer_files(server: Any, root: str) -> None:
    text = "the cat é 🐈"
    ids = server.llm.text.encode(text, add_special_tokens=False).tolist()
    assert server.post(f"{root}/tokenize", prompt=text, add_special_tokens=False).json()["tokens"] == ids
    assert server.post(f"{root}/tokenize", prompt=text).json()["tokens"] == [0, *ids]
    assert server.post(f"{root}/detokenize", tokens=ids).json() == {"prompt": text}
    facts = server.get(f"{root}/tokenizer_info").json()
    names = ("eos_token", "bos_token", "pad_token")
    assert [facts[name] for name in names] == ["<|eos|>", "<|bos|>", None]
    assert "assistant" in facts["chat_template"]
    assert server.post(f"{root}/detokenize", tokens=[-1]).status_code == 400


def test_a_conversation_is_tokenized_as_chat_lays_it_out(server: Any) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    tokens = server.post("/tokenize", messages=messages).json()["tokens"]
    reply = server.post("/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True).json()
    assert reply["prompt_token_ids"] == tokens


def test_capabilities_say_what_can_be_asked(server: Any) -> None:
    found = server.get("/v1/capabilities").json()
    assert "logprobs_mode" in found["fields"]
    assert "functions" in found["unsupported_fields"]
    assert found["stages"] == ["raw_logprobs", "processed_logprobs"]
    assert found["vocab_size"] == server.service.vocab_size
    for name in found["unsupported_fields"]:
        body = {name: {"type": "x"}} if name != "reasoning_effort" else {name: "high"}
        if name == "functions":
            body = {name: [{}]}
        reply = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], **body)
        assert reply.status_code == 400, name


def test_processors_are_listed_with_their_arguments(server: Any) -> None:
    found = {one["name"]: one for one in server.get("/v1/logits_processors").json()["data"]}
    assert "logit_bias" in found["LogitBiasLogitsProcessor"]["args"]["properties"]
    assert not any(one["registered"] for one in found.values())


def test_health_models_and_metrics(server: Any) -> None:
    assert server.get("/health").json()["status"] == "ok"
    name = server.get("/v1/models").json()["data"][0]["id"]
    assert server.get(f"/v1/models/{name}").json()["id"] == name
    assert server.get("/v1/models/other").status_code == 404
    text = server.get("/metrics").text
    assert 'logprobe_step_seconds_total{part="forward"}' in text
    assert "logprobe_free_slots" in text


def test_without_pyarrow_arrow_over_http_is_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logprobe.server.http.replies.find_spec", lambda _: None)
    reply = httpx.post(
        f"{server.url}/v1/loglikelihood",
        json={"model": "tiny", "context": "a", "continuations": ["b"]},
        headers={"accept": "application/vnd.apache.arrow.stream"},
        timeout=PATIENCE_S,
    )
    assert reply.status_code == 406
    assert "`arrow`" in reply.json()["error"]["message"]
