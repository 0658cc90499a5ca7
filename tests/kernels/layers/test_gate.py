"""Gates as a separate stage: the same bits as fused with the panel product."""

import pytest
import torch

from logprobe.kernels.layers.forms import PanelWeights, pack_floats
from logprobe.kernels.layers.panels import PLAIN, Finish, panel_stage
from logprobe.kernels.layers.rows import ACTIVATIONS, GATE_PIECE, gate_stage

NAMES = sorted(ACTIVATIONS.keys() - {"none"})
OUTPUTS, INPUTS = GATE_PIECE + 100, 32  # an incomplete block and an incomplete panel


def weights(seed: int) -> PanelWeights:
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(OUTPUTS, generator=generator)
    return pack_floats(torch.randn(OUTPUTS, INPUTS, generator=generator).bfloat16().float(), bias)


def product(x: torch.Tensor, panels: PanelWeights, finish: Finish = PLAIN) -> torch.Tensor:
    out = torch.empty(len(x), OUTPUTS)
    panel_stage(x, panels, out, finish).run()
    return out


@pytest.fixture(scope="module")
def layers() -> tuple[PanelWeights, PanelWeights]:
    return weights(1), weights(2)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("num_rows", [1, 9, 70])
def test_gates_and_values_apart_meet_to_the_bits_of_one_stage(
    layers: tuple[PanelWeights, PanelWeights], num_rows: int, activation: str
) -> None:
    x = torch.randn(num_rows, INPUTS, generator=torch.Generator().manual_seed(num_rows))
    gates, values = (product(x, layer) for layer in layers)
    out = torch.empty_like(gates)
    gate_stage(gates, values, out, activation).run()
    assert torch.equal(out, product(x, layers[0], Finish(values=layers[1], activation=activation)))
    gate_stage(gates, None, out, activation).run()
    assert torch.equal(out, product(x, layers[0], Finish(activation=activation)))


@pytest.mark.parametrize("has_values", [True, False])
@pytest.mark.parametrize("activation", NAMES)
def test_rows_may_lie_in_wider_arrays_and_out_may_be_the_gates(activation: str, *, has_values: bool) -> None:
    joined = torch.randn(20, 3 * GATE_PIECE, generator=torch.Generator().manual_seed(3))
    before = joined.clone()
    gates, values = joined[:, 7 : GATE_PIECE + 57], joined[:, GATE_PIECE + 57 : 2 * GATE_PIECE + 107]
    chosen = values if has_values else None
    wide = torch.zeros(20, 2 * GATE_PIECE)
    out = wide[:, 3 : GATE_PIECE + 53]
    gate_stage(gates, chosen, out, activation).run()
    want = torch.empty(20, GATE_PIECE + 50)
    gate_stage(gates.clone(), None if chosen is None else chosen.clone(), want, activation).run()
    assert torch.equal(out, want)
    assert torch.equal(joined, before)
    assert not wide[:, :3].any()
    assert not wide[:, GATE_PIECE + 53 :].any()
    gate_stage(gates, chosen, gates, activation).run()
    assert torch.equal(gates, want)
    assert torch.equal(joined[:, :7], before[:, :7])
    assert torch.equal(joined[:, GATE_PIECE + 57 :], before[:, GATE_PIECE + 57 :])


def test_no_rows_give_no_rows() -> None:
    nothing = torch.empty(0, 9)
    gate_stage(nothing, None, nothing, "silu").run()
