"""Expert routes over a whole `LLM`: replay, comparison, files, HTTP and other engines."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, SamplingParams
from logprobe.analysis import activations_to_arrow, compare, save_activations
from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARAMS = SamplingParams(max_tokens=6, seed=2, ignore_eos=True, logprobs=0, return_routed_experts=True)
TEXT = "the cat and the dog in the cat"


@pytest.fixture(scope="module")
def mixture(mixture_folder: Path) -> Iterator[LLM]:
    with LLM(str(mixture_folder), kv_cache_memory_bytes=1 << 21, max_num_seqs=8) as llm:
        yield llm


def test_a_replay_along_its_own_routes_has_the_same_bits(mixture: LLM) -> None:
    [output] = mixture.generate(TEXT, replace(PARAMS, n=2))
    for index, completion in enumerate(output.outputs):
        whole = output.prompt_token_ids + completion.token_ids
        routes = output.replayed_experts(index)
        assert routes.shape == (len(whole) - 1, 2, 2)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, routed_experts=routes)
        [again] = mixture.generate([whole], params)
        record = again.prompt_logprobs[len(output.prompt_token_ids) :]
        np.testing.assert_array_equal(
            record.chosen_entries().logprobs, completion.logprobs.chosen_entries().logprobs
        )


def test_routes_apply_to_generated_tokens_too(mixture: LLM) -> None:
    [free] = mixture.generate(TEXT, PARAMS)
    routes = free.replayed_experts()
    forced = (routes + 1) % 6
    [bound] = mixture.generate(TEXT, replace(PARAMS, routed_experts=forced))
    got = bound.replayed_experts()
    np.testing.assert_array_equal(got, forced[: len(got)])
    assert bound.outputs[0].logprobs != free.outputs[0].logprobs
    [again] = mixture.generate(TEXT, PARAMS)
    assert again.outputs[0].logprobs == free.outputs[0].logprobs


@pytest.mark.parametrize("settings", [{"speculate": True}, {"async_scheduling": True}, {"process": True}])
def test_routes_are_the_same_in_every_engine(
    mixture: LLM, mixture_folder: Path, settings: dict[str, Any]
) -> None:
    prompt = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
    params = replace(PARAMS, max_tokens=16, temperature=0.0)
    with LLM(str(mixture_folder), kv_cache_memory_bytes=1 << 21, **settings) as llm:
        [got] = llm.generate([prompt], params)
        [bound] = llm.generate([prompt], replace(params, routed_experts=got.replayed_experts()))
    [want] = mixture.generate([prompt], params)
    for one in (got, bound):
        assert one.outputs[0].token_ids == want.outputs[0].token_ids
        np.testing.assert_array_equal(one.replayed_experts(), want.replayed_experts())


def test_a_comparison_counts_the_positions_that_change_route(mixture: LLM, mixture_folder: Path) -> None:
    texts = [TEXT, "a dog and a cat"]
    same = compare(mixture, mixture, texts)
    assert same.changed_route_share == 0
    with LLM(str(mixture_folder), kv_cache_memory_bytes=1 << 21) as other:
        forward = other.engine.core.engine.forward  # type: ignore[attr-defined]
        state = {name: value.copy() for name, value in forward.decoder.state().items()}
        state["model.layers.1.mlp.gate.weight"] = state["model.layers.1.mlp.gate.weight"][::-1].copy()
        other.load_weights(state)
        found = compare(mixture, other, texts)
        want = []
        for text in texts:
            mine, theirs = (
                np.sort(llm.generate(text, PARAMS)[0].prompt_routed_experts, axis=-1)
                for llm in (mixture, other)
            )
            want.append((mine != theirs).any(axis=-1)[:-1])
    assert found.route_changes is not None
    np.testing.assert_array_equal(found.route_changes, np.concatenate(want))
    assert found.route_changes.shape == (found.num_positions, 2)
    assert not found.route_changes[:, 0].any()
    assert found.changed_route_share == found.route_changes[:, 1].mean() > 0.3
    assert found.to_dict()["changed_route_share"] == found.changed_route_share


def test_models_with_other_numbers_of_experts_per_token_have_no_such_figure(
    mixture: LLM, mixture_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(mixture_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    with LLM(str(folder), kv_cache_memory_bytes=1 << 21) as other:
        found = compare(mixture, other, [TEXT])
    assert found.changed_route_share is None
    assert found.kl_by_position is not None


def test_a_model_without_experts_has_no_such_figure(tiny_llm: LLM) -> None:
    assert compare(tiny_llm, tiny_llm, [TEXT]).changed_route_share is None
    with pytest.raises(ParameterError, match="no experts") as caught:
        tiny_llm.generate(TEXT, PARAMS)
    assert caught.value.parameter == "return_routed_experts"


def test_routes_come_back_from_their_files(mixture: LLM, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    [output] = mixture.generate(TEXT, replace(PARAMS, return_hidden_states=[1, -1]))
    save_activations(tmp_path / "a.safetensors", [output])
    tensors = load_file(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(tensors["0.0.routed_experts"], output.outputs[0].routed_experts)
    assert tensors["0.prompt.routed_experts"].dtype == np.uint8


def test_routes_are_in_an_arrow_table(mixture: LLM) -> None:
    pytest.importorskip("pyarrow")
    [output] = mixture.generate(TEXT, replace(PARAMS, return_hidden_states=[1, -1]))
    table = activations_to_arrow(output)
    routes = table["routed_experts"].combine_chunks().flatten().flatten().to_numpy().reshape(-1, 2, 2)
    np.testing.assert_array_equal(routes[: len(output.prompt_token_ids)], output.prompt_routed_experts)
    assert table["hidden_states"].type.list_size == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_routes_go_over_http_and_back(mixture: LLM, new_serving: Any, path: str, is_stream: bool) -> None:
    import httpx

    from logprobe.server import ServerSettings

    body: dict[str, Any] = {"max_tokens": 5, "seed": 1, "ignore_eos": True, "return_routed_experts": True}
    body |= (
        {"prompt": TEXT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": TEXT}]}
    )
    with new_serving(mixture, ServerSettings()) as (url, _):

        def ask(**more: Any) -> dict[str, Any]:
            reply = httpx.post(url + path, json=body | more | {"stream": is_stream}, timeout=60)
            assert reply.status_code == 200, reply.text
            if not is_stream:
                return dict(reply.json()["choices"][0])
            events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
            choices = [json.loads(event)["choices"] for event in events]
            [found] = [one for [one] in filter(None, choices) if "routed_experts" in one]
            return dict(found)

        routes = ask()["routed_experts"]
        array = np.frombuffer(base64.b64decode(routes["data"]), routes["dtype"]).reshape(routes["shape"])
        if path == "/v1/completions":
            [want] = mixture.generate(TEXT, replace(PARAMS, max_tokens=5, seed=1))
            np.testing.assert_array_equal(array, want.replayed_experts())
        assert ask(routed_experts=routes)["routed_experts"] == routes
        bad = routes | {"shape": [1, 2, 3]}
        reply = httpx.post(url + path, json=body | {"routed_experts": bad}, timeout=60)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "routed_experts.data")
        reply = httpx.post(url + path, json=body | {"stream": True, "n": 2}, timeout=60)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "return_routed_experts")
        wide = {"max_tokens": 50, "n": 64}
        full = new_serving(mixture, ServerSettings(max_logprob_bytes=1 << 16))
        with full as (other, _):
            reply = httpx.post(other + path, json=body | wide, timeout=60)
            assert reply.status_code == 400
            assert "max_logprob_bytes" in reply.json()["error"]["message"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_routes_are_in_the_metadata_of_arrow_replies(mixture: LLM, new_serving: Any, is_stream: bool) -> None:
    arrow = pytest.importorskip("pyarrow.ipc")
    import httpx

    from logprobe.server import ServerSettings

    body = {"prompt": TEXT, "max_tokens": 5, "seed": 1, "ignore_eos": True, "return_routed_experts": True}
    with new_serving(mixture, ServerSettings()) as (url, _):
        plain = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        reply = httpx.post(
            f"{url}/v1/completions",
            json=body | {"stream": is_stream},
            headers={"Accept": "application/vnd.apache.arrow.stream"},
            timeout=60,
        )
    metadata = list(_metadata_of(arrow, reply.content))
    [whole] = [json.loads(batch[b"logprobe.reply"]) for batch in metadata if b"logprobe.reply" in batch]
    assert whole["choices"][0]["routed_experts"] == plain.json()["choices"][0]["routed_experts"]


def _metadata_of(arrow: Any, data: bytes) -> Iterator[dict[bytes, bytes]]:
    """Yield the metadata of the schema and of each batch of an Arrow stream."""
    reader = arrow.open_stream(data)
    yield reader.schema.metadata or {}
    for _, metadata in reader.iter_batches_with_custom_metadata():
        yield dict(metadata or {})
