"""Packed layers against the modules that they replace, and the choice between layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Config
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXConfig, GPTNeoXMLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP
from transformers.pytorch_utils import Conv1D

from logprobe.engine.layers import packed
from logprobe.engine.layers.packed import (
    JoinedGatedMLP,
    PackedGatedMLP,
    PackedLinear,
    PackedPlainMLP,
    added,
    as_packed_norm,
    choose_layout,
    pack_,
)
from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
ROWS = [1, 3, 33, 300]
ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh"]


def make_mlp(activation: str, *, bias: bool = False) -> Any:
    torch.manual_seed(3)
    config = SimpleNamespace(hidden_size=48, intermediate_size=80, mlp_bias=bias, hidden_act=activation)
    return LlamaMLP(config).requires_grad_(requires_grad=False)


def make_norm(kind: type[nn.Module], *, epsilon: float = 1e-6) -> Any:
    norm = kind(48, eps=epsilon)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    return norm.requires_grad_(requires_grad=False)


def states(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows))


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_packed_linear_layer_gives_what_the_plain_one_gives(num_rows: int, *, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(50, 77, bias=bias)
    x = states(num_rows, 50)
    want = linear(x)
    packed = PackedLinear(linear)
    assert_close(packed(x), want)
    assert_close(packed(x[None]), want[None])
    assert_close(packed(states(50, num_rows).T), linear(states(50, num_rows).T))


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_packed_gated_mlp_gives_what_the_plain_one_gives(
    num_rows: int, activation: str, *, bias: bool
) -> None:
    mlp = make_mlp(activation, bias=bias)
    x = 3 * states(num_rows, 48)
    want = mlp(x[None])
    holder = nn.ModuleDict({"mlp": mlp})
    pack_(holder)
    assert type(holder["mlp"]) is PackedGatedMLP
    assert_close(holder["mlp"](x[None]), want)


PHI3 = Phi3Config(hidden_size=48, intermediate_size=96, hidden_act="gelu_pytorch_tanh", pad_token_id=0)
OTHER_MLPS: dict[str, tuple[Callable[[], nn.Module], type[nn.Module]]] = {
    "Phi-3": (lambda: Phi3MLP(PHI3), JoinedGatedMLP),
    "GPT-2": (lambda: GPT2MLP(80, GPT2Config(n_embd=48)), PackedPlainMLP),
    "GPT-NeoX": (
        lambda: GPTNeoXMLP(GPTNeoXConfig(hidden_size=48, intermediate_size=80, num_attention_heads=4)),
        PackedPlainMLP,
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("name", OTHER_MLPS)
def test_other_packed_mlps_give_what_the_plain_ones_give(name: str, num_rows: int) -> None:
    torch.manual_seed(3)
    make, packed = OTHER_MLPS[name]
    mlp = make().eval()
    x = states(num_rows, 48)
    want = mlp(x[None])
    holder = nn.ModuleDict({"mlp": mlp})
    pack_(holder)
    assert type(holder["mlp"]) is packed
    assert_close(holder["mlp"](x[None]), want)
    assert_close(added(holder["mlp"], x, x), want[0] + x)


@torch.no_grad()
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_packed_norm_gives_what_the_plain_one_gives(num_rows: int, kind: type[nn.Module]) -> None:
    norm = make_norm(kind)
    packed = as_packed_norm(norm)
    assert packed is not None
    for scale in (1e-4, 1.0, 1e4):
        x = states(num_rows, 48) * scale
        torch.testing.assert_close(packed(x), norm(x), rtol=2e-6, atol=0)


@torch.no_grad()
def test_a_norm_of_another_formula_is_left_alone() -> None:
    class CentredRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states - 0.1)

    class NoWeightRMSNorm(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    for norm in (make_norm(CentredRMSNorm), NoWeightRMSNorm(), nn.LayerNorm(48)):
        holder = nn.ModuleDict({"norm": norm})
        pack_(holder)
        assert holder["norm"] is norm


def test_a_norm_whose_epsilon_has_an_unknown_name_is_left_alone() -> None:
    norm = make_norm(LlamaRMSNorm, epsilon=1e-5)
    norm.tiny = norm.variance_epsilon
    del norm.variance_epsilon
    norm.forward = lambda x: norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.tiny)
    assert as_packed_norm(norm) is None


def test_a_norm_in_half_precision_is_left_alone() -> None:
    assert as_packed_norm(make_norm(LlamaRMSNorm).bfloat16()) is None


@torch.no_grad()
@pytest.mark.parametrize("change", ["activation", "names", "own linear"])
def test_an_unknown_mlp_keeps_its_own_code(change: str) -> None:
    class OwnLinear(nn.Linear):
        pass

    mlp = make_mlp("silu")
    if change == "activation":
        mlp.act_fn = ACT2FN["relu2"]
    elif change == "names":
        mlp.extra_proj = nn.Identity()
    else:
        mlp.up_proj = OwnLinear(48, 80, bias=False)
    x = states(5, 48)
    want = mlp(x)
    holder = nn.ModuleDict({"mlp": mlp})
    pack_(holder)
    assert holder["mlp"] is mlp
    assert type(mlp.gate_proj) is PackedLinear
    assert (type(mlp.up_proj) is PackedLinear) == (change != "own linear")
    assert_close(mlp(x), want)


def test_the_packed_form_keeps_the_shape_that_adapters_ask_for() -> None:
    packed = PackedLinear(nn.Linear(5, 7))
    assert (packed.in_features, packed.out_features) == (5, 7)


@pytest.mark.parametrize("layer", [nn.Linear(5, 7), Conv1D(7, 5)])
def test_auto_is_a_rule_so_that_every_load_gives_the_same_numbers(
    layer: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(layer, nn.Linear(7, 500))
    assert choose_layout(model, "auto") == "published"
    monkeypatch.setattr(packed, "can_widen", lambda: False)
    assert choose_layout(model, "auto") == "packed"
    assert choose_layout(model.bfloat16(), "auto") == "plain"


def test_gpt2s_linear_layer_is_packed_by_its_own_way_round() -> None:
    layer = Conv1D(7, 5)
    nn.init.normal_(layer.bias)
    packed = PackedLinear(layer)
    x = torch.randn(3, 2, 5)
    assert (packed.in_features, packed.out_features) == (5, 7)
    assert_close(packed(x), layer(x))


def test_a_linear_layer_whose_weight_another_module_reads_keeps_it() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 7)
            self.outer = nn.Linear(7, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(nn.functional.linear(x, self.inner.weight))

    gate = Gate()
    pack_(gate)
    assert type(gate.inner) is nn.Linear
    assert type(gate.outer) is PackedLinear


def test_auto_is_plain_with_neither_the_instructions_nor_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "can_widen", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert choose_layout(nn.Linear(5, 7), "auto") == "plain"


@pytest.mark.parametrize(
    "model",
    [nn.Linear(5, 7).bfloat16(), nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5).bfloat16()), nn.ReLU()],
    ids=["half precision", "mixed precision", "no linear layer"],
)
def test_auto_is_plain_where_nothing_can_be_packed(model: nn.Module) -> None:
    assert choose_layout(model, "auto") == "plain"


@pytest.mark.parametrize("reason", ["no oneDNN", "half precision"])
def test_a_layout_that_cannot_be_had_is_an_error_that_names_the_setting(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    model = nn.Linear(5, 7)
    if reason == "no oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        model = model.bfloat16()
    with pytest.raises(ParameterError, match="packed") as error:
        choose_layout(model, "packed")
    assert error.value.parameter == "weights"


@pytest.mark.parametrize("layout", ["plain", "packed", "published"])
def test_a_layout_that_is_named_is_taken(layout: Any) -> None:
    assert choose_layout(nn.Linear(5, 7), layout) == layout
