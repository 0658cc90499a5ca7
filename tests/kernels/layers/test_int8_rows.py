import pytest
import torch

from logprobe.kernels.layers.int8 import gate, quantise_rows, scale_products
from logprobe.kernels.layers.int8_rows import BLOCK, Int8Weights, int8_stage

SHAPES = [(1, 1, 1), (1, 63, 5), (3, 64, BLOCK), (2, 65, BLOCK + 1), (8, 576, 200), (4, 300, 2 * BLOCK)]


def make_weights(width: int, outputs: int, *, bias: bool) -> Int8Weights:
    torch.manual_seed(width + outputs)
    values = torch.randint(-127, 128, (outputs, width), dtype=torch.int8)
    factors = torch.rand(width) + 0.1
    return Int8Weights(values, torch.rand(outputs) / 100, factors, torch.randn(outputs) if bias else None)


def in_three_passes(x: torch.Tensor, weights: Int8Weights) -> torch.Tensor:
    rows, scales = quantise_rows(x, weights.column_factors)
    products = (rows.long() @ weights.values.long().T).int()
    out = scale_products(products, scales, weights.scales)
    return out if weights.bias is None else out + weights.bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_rows", "width", "outputs"), SHAPES)
def test_few_rows_have_the_bits_of_many(num_rows: int, width: int, outputs: int, *, bias: bool) -> None:
    weights = make_weights(width, outputs, bias=bias)
    x, out = 50 * torch.randn(num_rows, width), torch.empty(num_rows, outputs)
    int8_stage(x, weights, out).run()
    assert torch.equal(out, in_three_passes(x, weights))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_rows", "width", "outputs"), SHAPES)
def test_a_residual_is_added_in_its_own_place(num_rows: int, width: int, outputs: int, *, bias: bool) -> None:
    weights = make_weights(width, outputs, bias=bias)
    x, hidden = torch.randn(num_rows, width), torch.randn(num_rows, outputs)
    want = in_three_passes(x, weights) + hidden
    int8_stage(x, weights, hidden, residual=hidden).run()
    assert torch.equal(hidden, want)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_rows", "width", "half"), SHAPES)
def test_the_first_half_gates_the_second(num_rows: int, width: int, half: int, *, bias: bool) -> None:
    weights = make_weights(width, 2 * half, bias=bias)
    x, out = 20 * torch.randn(num_rows, width), torch.empty(num_rows, half)
    int8_stage(x, weights, out, is_gated=True).run()
    whole = in_three_passes(x, weights)
    assert torch.equal(out, gate(whole))
    want = torch.nn.functional.silu(whole[:, :half].double()) * whole[:, half:]
    torch.testing.assert_close(out, want.float(), rtol=1e-6, atol=1e-30)


def test_the_largest_integers_do_not_overflow() -> None:
    width = 4096
    weights = Int8Weights(
        torch.full((3, width), -127, dtype=torch.int8), torch.ones(3), torch.ones(width), None
    )
    out = torch.empty(1, 3)
    int8_stage(torch.full((1, width), 127.0), weights, out).run()
    assert (out == -127 * 127 * width).all()


def test_a_row_of_zeros_gives_zero() -> None:
    weights, out = make_weights(70, 9, bias=False), torch.empty(2, 9)
    int8_stage(torch.zeros(2, 70), weights, out).run()
    assert not out.any()
