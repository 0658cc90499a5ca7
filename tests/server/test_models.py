"""Several models in one server: selected by name, each with its own limits and a shared memory budget."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from logprobe import LLM, SamplingParams
from logprobe.config import EngineConfig
from logprobe.engine.backends.start import LoadedModel
from logprobe.errors import ModelError, ParameterError
from logprobe.models.sources import weight_bytes
from logprobe.server import ServerSettings
from logprobe.server.models import Models
from logprobe.server.settings import FurtherModel
from logprobe.testing import holding_steps
from server_process import PATIENCE_S, eventually, serving_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

POOL = 1 << 20
ASK = {"prompt": "the cat sat on", "max_tokens": 4, "logprobs": 2, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def serve_several(tiny_llm: LLM, tiny_window_folder: Path, new_serving: Any) -> Callable[..., Any]:
    """Serve the tiny Llama as `base` and other models by name (default: the tiny Gemma)."""

    @contextmanager
    def serve(further: dict[str, dict[str, Any]] | None = None, **settings: Any) -> Iterator[Any]:
        shared = ServerSettings(model_name="base", **settings)
        chosen = {"other": {}} if further is None else further
        models = {
            name: FurtherModel.of(
                name,
                EngineConfig(model=str(own.pop("folder", tiny_window_folder)), kv_cache_memory_bytes=POOL),
                shared,
                **own,
            )
            for name, own in chosen.items()
        }
        with new_serving(tiny_llm, shared, (), models) as (url, app):
            yield Served(url, app.state.models)

    return serve


class Served:
    def __init__(self, url: str, models: Models) -> None:
        self.url, self.models = url, models

    def ask(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=ASK | fields, timeout=PATIENCE_S)

    def get(self, path: str) -> Any:
        reply = httpx.get(self.url + path, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def figures(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text

    def states(self) -> dict[str, str]:
        return {one["id"]: one["status"]["value"] for one in self.get("/v1/models")["data"]}


def numbers(reply: httpx.Response) -> list[float]:
    assert reply.status_code == 200, reply.text
    found: list[float] = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
    return found


def numbers_of(llm: LLM) -> list[float]:
    params = SamplingParams(max_tokens=4, logprobs=2, temperature=0, ignore_eos=True)
    [output] = llm.generate([ASK["prompt"]], params)
    return [float(value) for value in output.outputs[0].logprobs.chosen_entries().logprobs]


def test_each_name_is_answered_by_its_own_model(
    serve_several: Any, tiny_llm: LLM, tiny_window_folder: Path
) -> None:
    with LLM(str(tiny_window_folder), kv_cache_memory_bytes=POOL) as llm:
        wanted = numbers_of(llm)
    with serve_several() as server:
        assert server.states() == {"base": "loaded", "other": "unloaded"}
        first = numbers(server.ask())
        assert first == pytest.approx(numbers_of(tiny_llm), abs=1e-6)
        reply = server.ask(model="other")
        assert numbers(reply) == pytest.approx(wanted, abs=1e-6)
        assert reply.json()["model"] == "other"
        assert server.states() == {"base": "loaded", "other": "loaded"}
        assert numbers(server.ask(model="base")) == first
        refused = server.ask(model="nobody")
        assert refused.status_code == 404
        assert "'base' or 'other'" in refused.json()["error"]["message"]
        for path in ("/v1/capabilities", "/v1/tokenizer_info"):
            assert server.get(f"{path}?model=other") != server.get(path)
        ids = [httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"] for body in asked_twice()]
        assert len(ids[0]) == len(ids[1]) + 1  # the Llama's tokenizer adds BOS


@pytest.mark.parametrize("further", [{}, {"other": {}}])
def test_a_get_of_an_unknown_model_is_a_404(serve_several: Any, further: Any) -> None:
    paths = ("/v1/tokenizer", "/tokenizer_info", "/v1/capabilities", "/v1/logits_processors", "/server_info")
    with serve_several(further) as server:
        for path in paths:
            refused = httpx.get(f"{server.url}{path}?model=nobody", timeout=PATIENCE_S)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
            assert httpx.head(f"{server.url}{path}?model=nobody", timeout=PATIENCE_S).status_code == 404
            for name in ("base", "default", *further):
                assert server.get(f"{path}?model={name}")


def test_every_name_of_a_further_model_is_listed_asleep_and_loaded(serve_several: Any) -> None:
    with serve_several({"other": {"served_model_name": ("o1", "o2")}}, served_model_name=("b1",)) as server:
        first, further = dict.fromkeys(("base", "b1"), "loaded"), ("other", "o1", "o2")
        assert server.states() == first | dict.fromkeys(further, "unloaded")
        assert server.ask(model="o2").json()["model"] == "other"
        assert server.states() == first | dict.fromkeys(further, "loaded")
        assert server.get("/v1/models/o1")["id"] == "o1"
        assert "'b1' or 'other' or 'o1' or 'o2'" in server.ask(model="nobody").json()["error"]["message"]


def asked_twice() -> list[dict[str, str]]:
    return [{"prompt": "the cat", "model": model} for model in ("base", "other")]


TEMPLATE = ["", "{query}{document}", ":"]


def test_every_route_and_figure_tells_the_models_apart(serve_several: Any) -> None:
    with serve_several() as server:
        chat = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2, "model": "other"}
        bodies = {
            "/v1/chat/completions": chat,
            "/v1/responses": {"input": "the cat", "max_output_tokens": 2, "model": "other"},
            "/v1/loglikelihood": {"context": "the cat", "continuations": [" sat"], "model": "other"},
            "/v1/label": {"input": "the cat", "labels": [" sat", " ran"], "model": "other"},
            "/generative_scoring": {
                "query": "the cat",
                "items": [" sat"],
                "label_token_ids": [5, 6],
                "model": "other",
            },
            "/v1/score": {"query": "the cat", "items": [" sat"], "label_token_ids": [5, 6], "model": "other"},
            "/v1/judge": {"input": "the cat", "model": "other"},
            "/v1/uncertainty": {"input": "the cat", "n": 2, "max_tokens": 2, "model": "other"},
            "/v1/rerank": {"query": "a", "documents": ["b"], "template": TEMPLATE, "model": "other"},
        }
        for path, body in bodies.items():
            reply = httpx.post(server.url + path, json=body, timeout=PATIENCE_S)
            assert (reply.status_code, reply.json()["model"]) == (200, "other"), reply.text
        kept = reply_id(server)
        assert server.get(f"/v1/responses/{kept}")["model"] == "other"
        text = server.figures()
        for name in ("running_requests", "engine_up", "step_seconds_total", "queue_seconds_count"):
            found = set(re.findall(rf'^logprobe_{name}{{.*?model="(\w+)"', text, re.MULTILINE))
            assert found == {"base", "other"}, name
        assert re.search(r'^logprobe_engine_up{model="other"} 1.0$', text, re.MULTILINE)
        assert 'logprobe_request_seconds_count{model="other",route="/v1/loglikelihood"} 1.0' in text
        assert server.get("/health") == {"status": "ok"}


def reply_id(server: Any) -> str:
    body = {"input": "the cat", "max_output_tokens": 2, "model": "other"}
    found: str = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE_S).json()["id"]
    return found


def test_who_asks_at_once_waits_for_one_load(serve_several: Any) -> None:
    with serve_several() as server, ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: server.ask(model="other"), range(8)))
        assert len({tuple(numbers(reply)) for reply in replies}) == 1
        loaded = server.models.loaded
        assert [service.model_name for service in loaded] == ["base", "other"]


def test_the_one_unused_longest_leaves_where_memory_is_short(
    serve_several: Any, tiny_window_folder: Path
) -> None:
    room = 2 * (weight_bytes(tiny_window_folder) + POOL)
    names = ("a", "b", "c")
    with serve_several({name: {} for name in names}, max_models_bytes=room) as server:
        first = {name: numbers(server.ask(model=name)) for name in ("a", "b")}
        engines = dict(server.models.engines())
        numbers(server.ask(model="a"))
        numbers(server.ask(model="c"))  # b is the least recently used
        assert server.states() == {"base": "loaded", "a": "loaded", "c": "loaded", "b": "unloaded"}
        assert engines["b"].stalled_s() > 0  # its engine has ended
        assert numbers(server.ask(model="b")) == first["b"]
        assert server.states()["a"] == "unloaded"


def test_a_model_in_use_never_leaves(serve_several: Any, tiny_window_folder: Path) -> None:
    room = weight_bytes(tiny_window_folder) + POOL
    with serve_several({"a": {}, "b": {}}, max_models_bytes=room) as server:
        numbers(server.ask(model="a"))
        [engine] = (service.engine for service in server.models.loaded[1:])
        with ThreadPoolExecutor(1) as pool:
            with holding_steps(engine):
                running = pool.submit(server.ask, model="a")
                eventually(lambda: engine.is_busy, "the request never comes")
                refused = server.ask(model="b")
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_full")
                assert "Retry-After" in refused.headers
                assert server.ask().status_code == 200, "the first model is none of them"
            numbers(running.result())
        eventually(lambda: server.ask(model="b").status_code == 200, "the other never gets its place")


def test_a_model_that_an_operator_has_changed_stays(serve_several: Any, tiny_window_folder: Path) -> None:
    room, key = weight_bytes(tiny_window_folder) + POOL, "an-operators-own-key"
    with serve_several({"a": {}, "b": {}}, max_models_bytes=room, operator_key=(key,)) as server:
        order = {"model_path": str(tiny_window_folder), "weight_version": "new", "model": "a"}
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{server.url}/update_weights_from_disk"
        done = httpx.post(url, json=order, headers=headers, timeout=PATIENCE_S)
        assert done.status_code == 200, done.text
        refused = server.ask(model="b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_full")
        assert server.get("/v1/models/a")["weight_version"] == "new"
        assert server.get(f"/v1/models/{tiny_window_folder}")["id"] == "a", "by the name of its files, too"


def test_each_has_limits_of_its_own(serve_several: Any) -> None:
    with serve_several({"other": {"max_requests": 2, "max_logprobs": 1}}) as server:
        assert server.ask(prompt=["a", "b", "c"]).status_code == 200
        refused = server.ask(prompt=["a", "b", "c"], model="other", logprobs=1)
        assert (refused.status_code, "max_requests" in refused.text) == (400, True)
        refused = server.ask(model="other")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
        limits = [server.get(f"/v1/capabilities{query}")["limits"] for query in ("", "?model=other")]
        assert [one["max_requests"] for one in limits] == [512, 2]


def test_lora_weights_name_their_model(
    serve_several: Any, adapter_folders: dict[str, Path], tiny_model_folder: Path
) -> None:
    wide, narrow = (str(adapter_folders[name]) for name in ("wide", "narrow"))
    further = {"twin": {"folder": tiny_model_folder, "lora_modules": (f"wide={wide}",)}}
    key = "an-operators-own-key"
    with serve_several(further, operator_key=(key,)) as server:
        base = numbers(server.ask())
        assert server.get("/v1/capabilities?model=wide")  # loads the model
        adapted = numbers(server.ask(model="wide"))
        assert adapted != base
        assert numbers(server.ask(model="twin", lora="wide")) == adapted
        assert numbers(server.ask(lora="wide")) == adapted

        def order(path: str, **body: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(server.url + path, json=body, headers=headers, timeout=PATIENCE_S)

        for taken in ("wide", "twin", "base"):
            refused = order("/v1/load_lora_adapter", lora_name=taken, lora_path=narrow, model="base")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name"), taken
        done = order("/v1/load_lora_adapter", lora_name="narrow", lora_path=narrow, model="twin")
        assert done.status_code == 200, done.text
        assert set(server.states()) == {"base", "twin", "wide", "narrow"}
        assert numbers(server.ask(model="narrow")) not in (base, adapted)
        assert order("/v1/unload_lora_adapter", lora_name="narrow").status_code == 200
        assert server.ask(model="narrow").status_code == 404


def test_a_model_that_breaks_is_told_and_the_others_go_on(
    serve_several: Any, tiny_window_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in tiny_window_folder.iterdir():
        os.link(file, tmp_path / file.name)
    with serve_several({"broken": {"folder": tmp_path}}) as server:
        (tmp_path / "config.json").unlink()
        refused = server.ask(model="broken")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")
        assert "cannot load broken" in caplog.text
        assert server.ask().status_code == 200
        (tmp_path / "config.json").write_bytes((tiny_window_folder / "config.json").read_bytes())
        assert server.ask(model="broken").status_code == 200


@pytest.mark.parametrize(
    ("name", "own", "settings", "parameter"),
    [
        ("base", {}, {}, "also_model"),
        ("default", {}, {}, "also_model"),
        ("other", {"served_model_name": ("base",)}, {}, "also_model"),
        ("other", {"lora_modules": ("other=x",)}, {}, "also_model"),
        ("other", {}, {"max_models_bytes": 1000}, "also_model"),
        ("other", {}, {"preload": ("nobody",)}, "preload"),
    ],
)
def test_what_cannot_be_is_told_at_the_start(
    tiny_llm: LLM, tiny_window_folder: Path, name: str, own: Any, settings: Any, parameter: str
) -> None:
    shared = ServerSettings(model_name="base", **settings)
    config = EngineConfig(model=str(tiny_window_folder), kv_cache_memory_bytes=POOL)
    further = {name: FurtherModel.of(name, config, shared, **own)}
    with pytest.raises(ParameterError) as raised:
        Models(LoadedModel(tiny_llm.engine, tiny_llm.text), shared, (), further)
    assert raised.value.parameter == parameter


def test_models_to_preload_fit_together(tiny_llm: LLM, tiny_window_folder: Path) -> None:
    size = weight_bytes(tiny_window_folder) + POOL
    config = EngineConfig(model=str(tiny_window_folder), kv_cache_memory_bytes=POOL)
    for room, fits in ((2 * size - 1, False), (2 * size, True)):
        shared = ServerSettings(max_models_bytes=room, preload=("a", "b", "a"))
        further = {name: FurtherModel.of(name, config, shared) for name in ("a", "b")}
        made = [LoadedModel(tiny_llm.engine, tiny_llm.text), shared, (), further]
        if fits:
            Models(*made)
        else:
            with pytest.raises(ParameterError, match="preload fewer"):
                Models(*made)


def test_a_model_that_is_nowhere_is_told_at_the_start(tiny_llm: LLM) -> None:
    further = {"gone": FurtherModel.of("gone", EngineConfig(model="/nowhere"), ServerSettings())}
    with pytest.raises(ModelError):
        Models(LoadedModel(tiny_llm.engine, tiny_llm.text), ServerSettings(), (), further)


def test_a_process_serves_what_flags_and_a_file_name(
    tiny_model_folder: Path, tiny_window_folder: Path, tmp_path: Path
) -> None:
    config = tmp_path / "server.toml"
    config.write_text(
        f'preload = ["filed"]\n[models.filed]\n'
        f'model = "{tiny_window_folder}"\nkv-cache-memory-bytes = {POOL}\n'
        'max_requests = 3\nserved-model-name = ["also"]\n',
        encoding="utf-8",
    )
    flags = (
        "--config",
        str(config),
        "--also-model",
        f"flagged={tiny_window_folder}",
        "--served-model-name",
        "base",
    )
    with serving_process(tiny_model_folder, *flags) as server:
        entries = json_of(server.get("/v1/models"))["data"]
        states = {one["id"]: one["status"]["value"] for one in entries}
        assert states == {"base": "loaded", "filed": "loaded", "also": "loaded", "flagged": "unloaded"}
        assert json_of(server.get("/v1/capabilities?model=filed"))["limits"]["max_requests"] == 3
        filed, also, flagged = (
            json_of(server.post("/v1/completions", model=model, **ASK))
            for model in ("filed", "also", "flagged")
        )
        chosen = [one["choices"][0]["logprobs"]["token_logprobs"] for one in (filed, also, flagged)]
        assert chosen[0] == chosen[1] == chosen[2]
        assert (filed["model"], also["model"], flagged["model"]) == ("filed", "filed", "flagged")


def json_of(reply: Any) -> Any:
    assert reply.status == 200, reply.data
    return json.loads(reply.data)
