"""A module whose matrices are read when something computes with them, beside one that holds them."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from families.rows import RIGHT, Row
from families.tiny import model_of
from logprobe.models import lazy
from logprobe.models.lazy import LazyModel, lazy_model
from logprobe.models.sources import FolderSource, StateSource, weight_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.models.sources import Source

TOLERANCE = 1e-5  # of the largest logit: pieces of a product may be summed in another order
IDS = torch.arange(3, 23)[None]


def state_of(model: Any) -> dict[str, torch.Tensor]:
    tied = model.all_tied_weights_keys
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def opened(model: Any, source: Source) -> LazyModel:
    """A module as lazy as can be of the configuration of one that is there."""
    made = lazy_model(copy.deepcopy(model.config), source, dtype=torch.float32)
    assert made is not None
    return made


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return out


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def is_unread(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.itemsize


@pytest.mark.parametrize("row", RIGHT, ids=lambda row: row.name)
def test_it_gives_the_logits_of_the_module_that_holds_them(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "PIECE_NUMBERS", 700)  # several pieces of each product
    model = model_of(row.kind, **row.special)
    model.set_attn_implementation("eager")
    made = opened(model, StateSource(state_of(model)))
    want = logits(model)
    with made.reading():
        assert_close(logits(made.module), want)
    parameters = {name: one for name, one in made.module.named_parameters() if one.dim() > 1}
    assert all(map(is_unread, parameters.values()))
    made.materialise_()
    assert torch.equal(logits(made.module), want)
    assert not any(map(is_unread, parameters.values()))


@torch.inference_mode()
def test_whatever_a_module_does_with_a_matrix_sees_its_numbers() -> None:
    model = model_of("llama", tie_word_embeddings=False)
    made, want = opened(model, StateSource(state_of(model))), model.lm_head.weight
    weight, x = made.module.lm_head.weight, torch.ones(2, model.config.hidden_size)
    ways: list[Any] = [
        lambda one: x @ one.T,
        lambda one: torch.cat([one, one]),
        lambda one: one[3:5],
        lambda one: one.data + 1,
        lambda one: torch.addmm(torch.zeros(2, len(one)), x, one.t()),
    ]
    with made.reading():
        assert (weight.shape, weight.dtype, weight.device) == (want.shape, want.dtype, want.device)
        for way in ways:
            assert torch.equal(way(weight), way(want))


def test_without_numbers_nothing_is_read() -> None:
    model = model_of("llama")
    made = opened(model, StateSource(state_of(model)))

    class Unreadable:
        shapes = made.source.shapes

        def read(self, name: str, _rows: Any = None) -> torch.Tensor:
            raise AssertionError(name)

    nothing: Any = LazyModel(made.module, Unreadable(), made.unread)  # type: ignore[arg-type]
    zeros: Any = torch.zeros(len(IDS[0]), 1)
    with torch.inference_mode(), nothing.reading(has_numbers=False):
        assert not made.module.lm_head(zeros.expand(-1, model.config.hidden_size)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_are_read_in_whatever_float_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    model = model_of("qwen2", tie_word_embeddings=False)
    state = {name: tensor.to(dtype) for name, tensor in state_of(model).items()}
    names = sorted(state)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: state[name] for name in part}, tmp_path / f"model-{number}.safetensors")
    made = opened(model, FolderSource(tmp_path))
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    with made.reading():
        assert_close(logits(made.module), logits(model))


@pytest.mark.parametrize("is_sharded", [True, False])
def test_of_a_folder_that_holds_the_weights_twice_the_files_of_transformers_are_read(
    tmp_path: Path, *, is_sharded: bool
) -> None:
    model = model_of("llama")
    name = "model-00001-of-00001.safetensors" if is_sharded else "model.safetensors"
    state = state_of(model)
    save_file(state, tmp_path / name)
    if is_sharded:
        index = {"weight_map": dict.fromkeys(state, name)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    save_file({"layers.0.wq": torch.ones(99, 99)}, tmp_path / "consolidated.safetensors")
    source = FolderSource(tmp_path)
    assert source.shapes.keys() == state.keys()
    assert weight_bytes(tmp_path) == (tmp_path / name).stat().st_size
    assert opened(model, source).unread


def test_names_below_the_decoder_and_frequencies_of_older_files_are_known() -> None:
    model = model_of("gpt2")
    prefix = f"{model.base_model_prefix}."
    state = {name.removeprefix(prefix): tensor for name, tensor in state_of(model).items()}
    state["h.0.attn.rotary_emb.inv_freq"] = torch.ones(3)
    made = opened(model, StateSource(state))
    with made.reading():
        assert_close(logits(made.module), logits(model))


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tied_matrix_may_be_there_twice_where_both_are_the_same(*, is_same: bool) -> None:
    model = model_of("llama", tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.detach()
    state = state_of(model) | {"lm_head.weight": embedding.clone() if is_same else embedding + 1}
    made = lazy_model(copy.deepcopy(model.config), StateSource(state), dtype=torch.float32)
    assert (made is not None) == is_same


def changed(state: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = state.pop(name)
    return (
        state
        | {
            "missing": {},
            "unknown": {name: tensor, "model.other.weight": tensor},
            "by another name": {"model.layers.0.mlp.w1.weight": tensor},
            "of another shape": {name: tensor[1:]},
            "of numbers that are not floats": {name: tensor.to(torch.int8)},
        }[how]
    )


@pytest.mark.parametrize(
    "how", ["missing", "unknown", "by another name", "of another shape", "of numbers that are not floats"]
)
def test_what_transformers_alone_knows_to_convert_is_left_to_it(how: str) -> None:
    model = model_of("llama")
    source = StateSource(changed(state_of(model), how))
    assert lazy_model(copy.deepcopy(model.config), source, dtype=torch.float32) is None
