"""Without transformers, a model is verified against the reference decoder and gives the same numbers."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from families.rows import RIGHT
from families.test_reference import ROWS
from families.tiny import model_of
from families.trials import TOLERANCE, Truth, load, quick_differences
from logprobe.config import EngineConfig
from logprobe.engine.forward import reference_proof
from logprobe.engine.forward.native import NativeForward
from logprobe.errors import UnsupportedModelError
from logprobe.models import ModelFiles
from logprobe.models.loading import as_state, read_state, save_state
from logprobe.models.sources import FolderSource, host_array

if TYPE_CHECKING:
    from pathlib import Path

    from families.rows import Row
    from logprobe.text.edge import TextEdge

REFUSED = [row for row in RIGHT if row.layers == "transformers"]


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("logprobe.engine.forward.load.has_transformers", lambda: False)
    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path / "home"))


def opened(model: Any, folder: Path, *, weights: Any = "checkpoint") -> NativeForward:
    """Load a model's configuration from a folder and its weights from memory."""
    model.config.save_pretrained(folder)
    config = EngineConfig(model="tiny", weights=weights, kv_cache_memory_bytes=1 << 20, device="cpu")
    return NativeForward(config, ModelFiles("tiny", folder), as_state(model.state_dict()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_model_that_the_reference_proves_has_the_numbers_of_transformers(
    row: Row, tmp_path: Path, text: TextEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(row.kind, **copy.deepcopy(row.special))
    forward = opened(model, tmp_path)
    assert forward.layout.verified_against == "reference"
    assert forward.layout.probe_difference < TOLERANCE
    for way, difference in quick_differences(Truth(model), forward, text):
        assert difference <= TOLERANCE, f"{way}: {difference:.1e} nats"
    monkeypatch.undo()
    other = load(model, "checkpoint")
    assert other.layout.verified_against.startswith("transformers ")
    assert (forward.vocab_size, forward.context_len) == (other.vocab_size, other.context_len)
    check_equal(forward.decoder, other.decoder)


def check_equal(ours: Any, theirs: Any) -> None:
    """The same decoder, except that a power in a rotary frequency may be rounded differently."""
    scaling, expected = ours.spec.rotary_scaling, theirs.spec.rotary_scaling
    assert scaling == pytest.approx(expected, rel=1e-6)
    assert msgspec.structs.replace(ours.spec, rotary_scaling=expected) == theirs.spec
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        if "inv_freq" in name:
            np.testing.assert_array_max_ulp(tensor, theirs.tensors[name], maxulp=4)
        else:
            assert np.array_equal(tensor, theirs.tensors[name]), name


@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_in_a_file_may_lack_the_name_of_the_decoder(prefix: str, tmp_path: Path) -> None:
    model = model_of("qwen2")
    model.config.save_pretrained(tmp_path)
    state = {
        name.removeprefix("model.") if prefix == "" else name: weight
        for name, weight in model.state_dict().items()
    }
    state[f"{prefix}layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_state(state, tmp_path)
    config = EngineConfig(model="tiny", weights="checkpoint", kv_cache_memory_bytes=1 << 20, device="cpu")
    forward = NativeForward(config, ModelFiles("tiny", tmp_path))
    again = NativeForward(config, ModelFiles("tiny", tmp_path))
    assert (forward.is_recalled, again.is_recalled) == (False, True)
    assert again.layout == forward.layout
    assert forward.decoder.spec.path == "model"
    check_equal(forward.decoder, again.decoder)


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_a_file_may_have_the_matrices_of_each_expert(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    names = FolderSource(tmp_path).shapes
    assert not any(name.endswith("experts.gate_up_proj") for name in names)
    config = EngineConfig(model="tiny", weights="checkpoint", kv_cache_memory_bytes=1 << 20, device="cpu")
    forward = NativeForward(config, ModelFiles("tiny", tmp_path))
    state, want = forward.decoder.state(), dict(model.named_parameters())
    assert state.keys() == want.keys()
    for name, weight in state.items():
        assert np.array_equal(host_array(weight), host_array(want[name])), name


def test_a_file_that_lacks_a_matrix_of_an_expert_is_refused(tmp_path: Path) -> None:
    model_of("mixtral").save_pretrained(tmp_path)
    state = read_state(tmp_path)
    del state["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_state({name: np.array(weight) for name, weight in state.items()}, tmp_path)
    config = EngineConfig(model="tiny", weights="checkpoint", kv_cache_memory_bytes=1 << 20, device="cpu")
    with pytest.raises(UnsupportedModelError, match=r"experts of model\.layers\.1 lack matrices"):
        NativeForward(config, ModelFiles("tiny", tmp_path))


def test_a_decoder_that_computes_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = reference_proof.logits

    def off(*args: Any, **options: Any) -> Any:
        numbers = own(*args, **options)
        return numbers + 3e-4 * np.abs(numbers).max() * (np.arange(numbers.shape[1]) == 7)

    monkeypatch.setattr(reference_proof, "logits", off)
    with pytest.raises(UnsupportedModelError):
        opened(model_of("llama"), tmp_path)


@pytest.mark.parametrize("start", [0, 116])
def test_every_start_position_is_compared(
    start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, starts = reference_proof.logits, []

    def off(*args: Any, **options: Any) -> Any:
        starts.append(options["start"])
        return own(*args, **options) * (1.01 if options["start"] == start else 1)

    monkeypatch.setattr(reference_proof, "logits", off)
    with pytest.raises(UnsupportedModelError):
        opened(model_of("llama"), tmp_path)
    assert starts == [0, 116]


@pytest.mark.parametrize("row", REFUSED[:8], ids=lambda row: row.name)
def test_a_family_without_a_native_decoder_asks_for_transformers(row: Row, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"pip install 'logprobe\[torch\]'"):
        opened(model_of(row.kind, **copy.deepcopy(row.special)), tmp_path)


def test_plain_weights_ask_for_transformers(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"pip install 'logprobe\[torch\]'"):
        opened(model_of("llama"), tmp_path, weights="plain")


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("model.layers.1.self_attn.k_proj.weight"),
        lambda state: state.pop("model.layers.1.self_attn.k_proj.bias"),
        lambda state: state.pop("lm_head.weight"),
        lambda state: state.update({"model.layers.1.mlp.extra.weight": torch.ones(4, 4)}),
        lambda state: state.update({"extra.weight": torch.ones(4, 4)}),
    ],
    ids=["a matrix", "a bias", "the head", "another in a layer", "another"],
)
def test_tensors_that_do_not_match_the_model_are_refused(change: Any, tmp_path: Path) -> None:
    model = model_of("qwen2", tie_word_embeddings=False)
    model.config.save_pretrained(tmp_path)
    state = dict(model.state_dict())
    change(state)
    config = EngineConfig(model="tiny", weights="checkpoint", kv_cache_memory_bytes=1 << 20, device="cpu")
    with pytest.raises(UnsupportedModelError):
        NativeForward(config, ModelFiles("tiny", tmp_path), as_state(state))


def test_a_model_is_loaded_and_generates_where_transformers_is_not_installed(tiny_model_folder: Path) -> None:
    code = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
from logprobe import LLM, SamplingParams
with LLM(sys.argv[1], kv_cache_memory_bytes=1 << 22, weights="checkpoint") as llm:
    output = llm.generate(["the"], SamplingParams(max_tokens=2, temperature=0, logprobs=1))[0]
print(output.outputs[0].logprobs.info.verified_against, len(output.outputs[0].token_ids))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model_folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "reference 2\n"
