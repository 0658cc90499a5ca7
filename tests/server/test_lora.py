"""LoRA adapters over HTTP: selected by `lora` or `model` on every route, loaded before the first request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from logprobe import LLM, SamplingParams
from logprobe.engine.backends.start import LoadedModel
from logprobe.errors import ModelError, ParameterError
from logprobe.server import ServerSettings
from logprobe.server.models import Models
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

TOLERANCE = 5e-5
PROMPT = "the cat and the dog"
MESSAGES = [{"role": "user", "content": PROMPT}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "seed": 1},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 3, "logprobs": 2, "seed": 1},
    "/v1/responses": {
        "input": PROMPT,
        "max_output_tokens": 3,
        "include": ["message.output_text.logprobs"],
        "seed": 1,
    },
    "/v1/loglikelihood": {"context": PROMPT, "continuations": [" of", " the"], "unconditional": True},
    "/v1/label": {"input": PROMPT, "labels": [" of", " the"], "correction": "calibrated"},
    "/generative_scoring": {"query": PROMPT, "items": [" of", " the"], "label_token_ids": [5, 6]},
    "/v1/score": {"query": PROMPT, "items": [" of", " the"], "label_token_ids": [5, 6]},
    "/v1/judge": {"messages": MESSAGES, "scale": [1, 2, 10]},
    "/v1/rerank": {"query": PROMPT, "documents": [" a", " of"], "template": ["", "{query}{document}", ":"]},
}


@pytest.fixture(scope="module")
def adapted(tiny_model_folder: Path, adapter_folders: dict[str, Path], serve_llm: Any) -> Iterator[Any]:
    given = tuple(f"{name}={folder}" for name, folder in adapter_folders.items())
    settings = {"model_name": "base", "lora_modules": given}
    with (
        LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20) as llm,
        serve_llm(llm, **settings) as running,
    ):
        running.service.prepare()
        yield running


def ask(server: Any, path: str, **fields: Any) -> dict[str, Any]:
    reply = server.post(path, **ROUTES[path], **fields)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def numbers(reply: dict[str, Any]) -> Any:
    """Return every log-probability of a reply that depends on the choice of weights."""
    if "results" in reply:
        return [one["relevance_score"] for one in sorted(reply["results"], key=lambda one: one["index"])]
    if "scores" in reply:
        return np.log(reply["scores"])
    if reply["id"].startswith("generative-scoring"):
        return np.log([one["score"] for one in reply["data"]])
    if reply["object"] == "list":
        return [one.get("corrected", one["probs"]) for one in reply["data"]]
    if "data" in reply:
        return [one["token_logprobs"] + [one["unconditional_logprob"]] for one in reply["data"]]
    if "output" in reply:
        return [row["logprob"] for row in reply["output"][0]["content"][0]["logprobs"]]
    rows = reply["choices"][0]["logprobs"]
    return rows["token_logprobs"] if "token_logprobs" in rows else [row["logprob"] for row in rows["content"]]


@pytest.mark.parametrize("path", ROUTES)
def test_an_adapter_is_chosen_by_lora_or_as_the_model(adapted: Any, path: str) -> None:
    base = ask(adapted, path)
    assert base["model"] == "base"
    assert ask(adapted, path, model="base")["model"] == "base"
    seen = [numbers(base)]
    for name in ("wide", "narrow"):
        replies = [
            ask(adapted, path, lora=name),
            ask(adapted, path, lora=name, model="base"),
            ask(adapted, path, model=name),
            ask(adapted, path, model=name, lora=name),
        ]
        assert {reply["model"] for reply in replies} == {name}
        for reply in replies[1:]:
            np.testing.assert_allclose(numbers(reply), numbers(replies[0]), atol=TOLERANCE, rtol=0)
        seen.append(numbers(replies[0]))
    assert not any(np.allclose(seen[i], seen[j], atol=1e-3) for i, j in [(0, 1), (0, 2), (1, 2)])


@pytest.mark.parametrize("name", [None, "wide", "narrow"])
def test_an_adapters_numbers_are_those_of_the_offline_front_door(adapted: Any, name: str | None) -> None:
    params = SamplingParams(max_tokens=3, logprobs=0, seed=1, lora=name)
    (output,) = adapted.llm.generate(PROMPT, params)
    found = numbers(ask(adapted, "/v1/completions", lora=name))
    want = list(output.outputs[0].logprobs.chosen_entries().logprobs)
    assert found == pytest.approx(want, abs=TOLERANCE)
    scores = adapted.llm.with_lora(name).score([(PROMPT, " of"), (PROMPT, " the")])
    scored = ask(adapted, "/v1/loglikelihood", lora=name)["data"]
    assert [one["logprob"] for one in scored] == pytest.approx(
        [score.logprob for score in scores], abs=TOLERANCE
    )


def test_whole_rows_come_from_the_adapter(adapted: Any) -> None:
    rows = {}
    for name in (None, "wide", "narrow"):
        by_field = adapted.post("/v1/next_token_logprobs", prompts=[PROMPT], lora=name)
        by_model = adapted.post("/v1/next_token_logprobs", prompts=[PROMPT], model=name)
        rows[name] = load(by_field.content)["logprobs"][0]
        np.testing.assert_allclose(load(by_model.content)["logprobs"][0], rows[name], atol=TOLERANCE, rtol=0)
        (output,) = adapted.llm.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=-1, lora=name))
        (position,) = output.outputs[0].logprobs
        assert rows[name][5] == pytest.approx(position[5].logprob, abs=TOLERANCE)
    assert np.abs(rows["wide"] - rows[None]).max() > 0.05
    assert np.abs(rows["wide"] - rows["narrow"]).max() > 0.05


def test_a_stream_runs_on_the_adapter(adapted: Any) -> None:
    client = adapted.client()
    asked = {"model": "base", "prompt": PROMPT, "max_tokens": 8, "seed": 1}
    whole = client.completions.create(**asked, extra_body={"lora": "wide"})
    chunks = list(client.completions.create(**asked, stream=True, extra_body={"lora": "wide"}))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert {chunk.model for chunk in chunks} == {"wide"}
    assert whole.choices[0].text != client.completions.create(**asked).choices[0].text


@pytest.mark.parametrize("path", [*ROUTES, "/v1/next_token_logprobs"])
def test_an_unknown_adapter_is_refused_and_the_known_ones_are_named(adapted: Any, path: str) -> None:
    body = ROUTES.get(path, {"prompts": [PROMPT]})
    for fields, status, param in (
        ({"lora": "nobody"}, 400, "lora"),
        ({"lora": ""}, 400, "lora"),
        ({"lora": 5}, 400, "lora"),
        ({"lora": "wide", "model": "narrow"}, 400, "lora"),
        ({"model": "nobody"}, 404, "model"),
    ):
        reply = adapted.post(path, **body, **fields)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (status, param), (fields, error)
        if "nobody" in fields.values():
            assert "wide" in error["message"]
            assert "narrow" in error["message"]


def test_models_lists_adapters_after_the_model(adapted: Any, adapter_folders: dict[str, Path]) -> None:
    found = adapted.get("/v1/models").json()["data"]
    assert [one["id"] for one in found] == ["base", "wide", "narrow"]
    assert "parent" not in found[0]
    for one in found[1:]:
        assert (one["parent"], one["root"]) == ("base", str(adapter_folders[one["id"]]))
        assert adapted.get(f"/v1/models/{one['id']}").json() == one
    assert adapted.get("/v1/models/nobody").status_code == 404
    assert "lora" in adapted.get("/v1/capabilities").json()["fields"]


@pytest.mark.parametrize("given", ["no-path", "=folder", "name="])
def test_an_adapter_without_name_and_path_is_refused(given: str) -> None:
    with pytest.raises(ParameterError, match="NAME=PATH"):
        ServerSettings(lora_modules=(given,))


def test_adapters_that_cannot_be_loaded_end_the_start(adapted: Any, tmp_path: Path) -> None:
    model, known = LoadedModel(adapted.llm.engine, adapted.llm.text), adapted.llm.list_loras()
    with pytest.raises(ModelError, match="adapter_config"):
        Models(model, ServerSettings(lora_modules=(f"new={tmp_path}",))).prepare()
    for name in ("base", model.engine.capabilities().model):
        with pytest.raises(ParameterError, match="a model's name"):
            Models(model, ServerSettings(model_name="base", lora_modules=(f"{name}={tmp_path}",))).prepare()
    with pytest.raises(ParameterError, match="used twice"):
        Models(model, ServerSettings(lora_modules=(f"wide={known['wide']}",) * 2)).prepare()
    assert adapted.llm.list_loras() == known


def test_the_command_loads_adapters_before_it_listens_and_stops_at_a_bad_one(
    tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    program = Path(sys.executable).with_name("logprobe")
    command = [program, "serve", str(tiny_model_folder), "--port", "0", "--kv-cache-memory-bytes", "2000000"]
    bad = subprocess.run(
        [*command, "--lora-modules", "bad=/nowhere"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert bad.returncode == 1
    assert bad.stderr.splitlines()[-1].startswith("error: ")
    assert "/nowhere" in bad.stderr
    assert "listening" not in bad.stderr
    given = [
        word for name, folder in adapter_folders.items() for word in ("--lora-modules", f"{name}={folder}")
    ]
    with subprocess.Popen([*command, *given], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "listening" in line).split()[-1]
        found = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]
        process.terminate()
    assert [one["id"] for one in found[1:]] == list(adapter_folders)


def test_a_list_of_models_is_named_anew_when_it_changes(
    adapted: Any, adapter_folders: dict[str, Path]
) -> None:
    before = adapted.get("/v1/models").headers["etag"]
    adapted.llm.add_lora("one more", adapter_folders["wide"])
    try:
        assert adapted.get("/v1/models").headers["etag"] != before
    finally:
        adapted.llm.remove_lora("one more")
    assert adapted.get("/v1/models").headers["etag"] == before
