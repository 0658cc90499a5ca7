"""8-bit layers against float32 ones and a plain torch twin."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from logprobe.engine.layers.int8 import (
    SHARE_OF_INPUTS,
    SHARE_WHERE_NARROWER,
    Int8Linear,
    check_int8,
    quantise_,
)
from logprobe.engine.layers.packed import PackedNorm
from logprobe.errors import ParameterError

pytestmark = pytest.mark.filterwarnings("error")
ROWS = [1, 3, 33, 300]


def make_linear(*, bias: bool = False, outputs: int = 45) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(63, outputs, bias=bias).requires_grad_(requires_grad=False)


def states(num_rows: int) -> torch.Tensor:
    """Rows with a few channels far larger than the rest, as decoders have them."""
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, 63)
    x[:, [5, 40]] *= 60
    return x


def twin(linear: nn.Linear, x: torch.Tensor, largest_inputs: torch.Tensor) -> torch.Tensor:
    """Smoothed, rounded and multiplied in float64."""
    weight, x = linear.weight.double(), x.double()
    inputs, outputs = largest_inputs.double(), weight.abs().amax(0)
    share = SHARE_WHERE_NARROWER if linear.out_features < 63 else SHARE_OF_INPUTS
    factors = inputs**share / outputs ** (1 - share)
    weight, x = weight * factors, x / factors
    scales, row_scales = weight.abs().amax(1) / 127, x.abs().amax(1) / 127
    whole_weight = (weight / scales[:, None]).round()
    whole_rows = (x / row_scales[:, None]).round()
    out = (whole_rows @ whole_weight.T) * row_scales[:, None] * scales
    return out if linear.bias is None else out + linear.bias


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("outputs", [45, 63, 200])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_layer_equals_its_twin(num_rows: int, outputs: int, *, bias: bool) -> None:
    linear, x = make_linear(bias=bias, outputs=outputs), states(num_rows)
    largest = x.abs().amax(0)
    want = twin(linear, x, largest)
    # A value on the edge between two whole numbers may fall to either side: 1 of 127, in few places.
    assert relative_error(Int8Linear(linear, largest)(x), want) < 2e-3


@pytest.mark.parametrize("num_rows", ROWS)
def test_a_layer_stays_near_float32(num_rows: int) -> None:
    linear, x = make_linear(bias=True), states(num_rows)
    assert relative_error(Int8Linear(linear, x.abs().amax(0))(x), linear(x)) < 0.02


def test_smoothing_helps_where_few_channels_are_large() -> None:
    linear, x = make_linear(), states(300)
    smooth = Int8Linear(linear, x.abs().amax(0))(x)
    balanced = linear.weight.abs().amax(0) ** ((1 - SHARE_WHERE_NARROWER) / SHARE_WHERE_NARROWER)
    rough = Int8Linear(linear, balanced)(x)
    assert relative_error(smooth, linear(x)) < 0.7 * relative_error(rough, linear(x))


def test_leading_dimensions_are_kept() -> None:
    linear, x = make_linear(bias=True), states(12)
    layer = Int8Linear(linear, x.abs().amax(0))
    assert torch.equal(layer(x.view(2, 6, 63)), layer(x).view(2, 6, 45))


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    linear, x = make_linear(bias=True), states(40)
    layer = Int8Linear(linear, x.abs().amax(0))
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


def test_rows_and_weights_of_zero_give_zero() -> None:
    linear = make_linear()
    linear.weight[7] = 0
    linear.weight[:, 9] = 0
    x = states(4)
    x[2] = 0
    out = Int8Linear(linear, x.abs().amax(0))(x)
    assert out.isfinite().all()
    assert not out[2].any()
    assert not out[:, 7].any()


def test_a_channel_that_was_silent_while_calibrating_may_speak() -> None:
    linear, x = make_linear(), states(30)
    largest = x.abs().amax(0)
    largest[3] = 0
    assert Int8Linear(linear, largest)(x).isfinite().all()


class Decoder(nn.Module):
    """Two layers that run and one that does not, with a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = make_linear(), nn.Linear(45, 63, bias=True)
        self.norm, self.unused = LlamaRMSNorm(45), nn.Linear(63, 63)
        self.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., 63) → (..., 63)."""
        out: torch.Tensor = self.second(self.norm(self.first(x)))
        return out


def test_what_runs_is_replaced_and_the_rest_left() -> None:
    model, x = Decoder(), states(50)
    unused, want = model.unused, model(x)
    quantise_(model, lambda: [model(x[None, :20]), model(x[None, 20:])])
    assert type(model.first) is type(model.second) is Int8Linear
    assert type(model.norm) is PackedNorm
    assert model.unused is unused
    assert not unused._forward_pre_hooks
    assert relative_error(model(x), want) < 0.03


def test_the_largest_inputs_are_those_of_all_runs() -> None:
    one, two, x = Decoder(), Decoder(), states(50)
    quantise_(one, lambda: one(x))
    quantise_(two, lambda: [two(row[None]) for row in x])
    assert torch.equal(one.first(x), two.first(x))


def test_a_calibration_that_fails_leaves_the_model_as_it_was() -> None:
    model, x = Decoder(), states(5)
    want = model(x)
    with pytest.raises(RuntimeError):
        quantise_(model, lambda: model(x[:, :-1]))
    assert torch.equal(model(x), want)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_decoder_whose_matrices_are_not_all_linear_layers_is_refused() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3, 4))

    check_int8(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4), nn.LayerNorm(4)))
    for part in (Experts(), Conv1D(4, 3)):
        with pytest.raises(ParameterError, match=f"int8 is not proven for {type(part).__name__}") as error:
            check_int8(nn.Sequential(nn.Linear(3, 4), part))
        assert error.value.parameter == "weights"
