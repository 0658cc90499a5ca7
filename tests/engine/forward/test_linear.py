"""Linear layers and embeddings on packed panels, compared with torch's and transformers'."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from logprobe.config import EngineConfig
from logprobe.engine.forward import load
from logprobe.engine.forward.cpu.linear import GatedPanels, Linear, dense, in_huge_pages, packed
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.forward.torch.transformers_linear import (
    PanelEmbedding,
    PanelLinear,
    matrices_of,
    use_panels_,
)
from logprobe.errors import ParameterError
from logprobe.kernels.layers.forms import pack_floats
from logprobe.models import resolve
from logprobe.models.lazy import LazyModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLERANCE = 2e-6  # relative to the largest value
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def linear(inputs: int, outputs: int, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(requires_grad=False)


def rows(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def panels_of(model: nn.Module) -> dict[str, Any]:
    with torch.inference_mode():
        matrices = matrices_of(model, with_experts=True)
        made = zip(matrices, packed(matrices, LazyModel.of(model).source), strict=True)
        return {name: panels for matrix, panels in made for name in matrix.names}


def assert_close(got: Any, want: torch.Tensor) -> None:
    got = torch.as_tensor(got)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(7,), (1, 5), (2, 3), (40,)])
def test_a_linear_layer_gives_its_product(shape: tuple[int, ...]) -> None:
    plain = linear(80, 96)
    panels = Linear([pack_floats(plain.weight, plain.bias)])
    x = rows(int(torch.Size(shape).numel()), 80).view(*shape, 80)
    assert_close(panels(x), plain(x))


@torch.inference_mode()
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_parts_of_several_forms_make_one_layer(factor: float) -> None:
    parts = [linear(64, 48, seed=seed) for seed in range(3)]
    parts[1].weight.copy_(parts[1].weight.bfloat16())
    first, *others = (Linear([pack_floats(part.weight, part.bias)]) for part in parts)
    whole = first.joined(others)
    assert (len(whole.parts), whole.num_outputs) == (3, 144)
    x, residual, out = rows(9, 64), torch.ones(9, 144), torch.empty(9, 144)
    want = torch.cat([part(x) for part in parts], dim=1)
    assert_close(whole(x), want)
    for stage in whole.stages(x, out, residual, factor):
        stage.run()
    assert_close(out, factor * want + residual)


def test_panels_in_huge_pages_are_the_same_and_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logprobe.engine.forward.cpu.linear.PAGED_BYTES", 1 << 16)
    layers = [linear(64, size, seed=size) for size in (96, 48, 48, 4800, 48)]
    alone = [pack_floats(layer.weight, layer.bias) for layer in layers]
    moved = [*in_huge_pages(alone)]
    for one, before in zip(moved, alone, strict=True):
        assert (one.form, one.num_outputs) == (before.form, before.num_outputs)
        assert one.bias is before.bias
        assert (one.data == before.data).all()
        assert one.address != before.address
    joined = moved[0].joined(moved[1:3])
    assert joined is not None
    assert joined.address == moved[0].address  # not copied


@torch.inference_mode()
@pytest.mark.parametrize("size", [112, 80], ids=["whole panels", "a panel is cut"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_and_values_are_read_in_one_pass(
    activation: str, size: int, *, is_gated: bool, bias: bool
) -> None:
    gates, values = (linear(48, size, bias=bias, seed=seed) for seed in (1, 2))
    packed, other = (pack_floats(layer.weight, layer.bias) for layer in (gates, values))
    inner = GatedPanels(packed, other if is_gated else None, activation)
    assert inner.is_one_pass
    x, out = rows(11, 48), torch.empty(11, size)
    inner.stage(x, out).run()
    want = ACTIVATIONS[activation](gates(x))
    assert_close(out, want * values(x) if is_gated else want)


@torch.inference_mode()
def test_rows_have_the_same_bits_whatever_their_number() -> None:
    gates, values = (pack_floats(linear(48, 112, seed=seed).weight.bfloat16().float()) for seed in (1, 2))
    inner, plain = GatedPanels(gates, values, "silu"), Linear([gates])
    x, whole = rows(70, 48), torch.empty(70, 112)
    inner.stage(x, whole).run()
    for count in (1, 2, 7, 9, 40):
        out = torch.empty(count, 112)
        inner.stage(x[:count], out).run()
        assert torch.equal(out, whole[:count])
        assert (plain(x[:count]) == plain(x)[:count]).all()


@torch.inference_mode()
def test_gpt2s_linear_layer_is_packed_by_its_own_way_round() -> None:
    layer = Conv1D(7, 5)
    nn.init.normal_(layer.bias)
    model = nn.ModuleDict({"c_attn": layer})
    x = torch.randn(3, 2, 5)
    want = layer(x)
    use_panels_(model, panels_of(model))
    assert type(model["c_attn"]) is PanelLinear
    assert (model["c_attn"].in_features, model["c_attn"].out_features) == (5, 7)
    assert_close(model["c_attn"](x), want)


@torch.inference_mode()
def test_gates_and_values_of_one_layer_are_packed_apart() -> None:
    whole = linear(48, 160, bias=False)
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate_up_proj": whole})})
    halves = panels_of(model)
    assert list(halves) == ["mlp.gate_up_proj.gates", "mlp.gate_up_proj.values"]
    got = torch.from_numpy(np.concatenate([dense(half) for half in halves.values()]))
    assert torch.equal(got, whole.weight)


class Tied(nn.Module):
    """An embedding that shares its weight with the head."""

    def __init__(self, kind: type[nn.Embedding] = nn.Embedding) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = kind(100, 64), nn.Linear(64, 100, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.requires_grad_(requires_grad=False)


class ScaledEmbedding(nn.Embedding):
    """Scales its output, as in Gemma 3."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(token_ids) * 7.0


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "is_replaced"), [(nn.Embedding, True), (ScaledEmbedding, False)])
def test_a_tied_head_shares_its_panels_and_a_derived_embedding_stays(
    kind: type[nn.Embedding], *, is_replaced: bool
) -> None:
    model = Tied(kind)
    weight, ids = model.lm_head.weight.clone(), torch.tensor([[3, 99, 3, 0]])
    want = model.embed_tokens(ids)
    panels = panels_of(model)
    assert panels["embed_tokens"] is panels["lm_head"]
    use_panels_(model, panels)
    assert (type(model.embed_tokens) is PanelEmbedding) == is_replaced
    assert torch.equal(model.embed_tokens(ids), want)
    assert torch.equal(model.embed_tokens.weight, weight)
    assert_close(model.lm_head(rows(2, 64)), rows(2, 64) @ weight.T)


@torch.inference_mode()
def test_panels_are_taken_by_name_and_the_bias_stays_the_layers() -> None:
    model = nn.ModuleDict({"o_proj": linear(32, 32), "other": linear(32, 32)})
    bias = model["o_proj"].bias.clone()
    use_panels_(model, {"o_proj": pack_floats(torch.eye(32))})
    assert torch.equal(model["o_proj"](torch.ones(1, 32))[0], 1 + bias)
    assert type(model["other"]) is nn.Linear


@torch.inference_mode()
def test_a_module_reads_the_weight_of_a_layer_as_it_was_and_one_of_its_own_class_stays() -> None:
    class OwnLinear(nn.Linear):
        """An unknown subclass."""

    model = nn.ModuleDict({"known": linear(5, 7), "own": OwnLinear(5, 7)})
    weight = model["known"].weight.clone()
    panels = panels_of(model)
    use_panels_(model, panels)
    assert torch.equal(copy.deepcopy(model["known"]).weight, weight)
    assert type(model["own"]) is OwnLinear


@pytest.mark.parametrize("weights", ["checkpoint", "plain", "auto"])
def test_a_machine_without_the_kernels_runs_plain_weights_alone(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, weights: Any
) -> None:
    monkeypatch.setattr(load, "native_library", lambda: None)
    name = str(tiny_model_folder)
    config = EngineConfig(model=name, weights=weights, kv_cache_memory_bytes=1 << 20)
    if weights == "checkpoint":
        with pytest.raises(ParameterError, match="checkpoint") as error:
            NativeForward(config, resolve(name))
        assert error.value.parameter == "weights"
    else:
        assert NativeForward(config, resolve(name)).weights == "plain"


def test_published_weights_of_16_bits_are_an_error_that_names_the_setting(tiny_model_folder: Path) -> None:
    config = EngineConfig(model=str(tiny_model_folder), weights="checkpoint", dtype="bfloat16")
    with pytest.raises(ParameterError, match="needs float32") as error:
        NativeForward(config, resolve(config.model))
    assert error.value.parameter == "weights"
