import pytest
import torch

from logprobe.kernels.layers.int8 import (
    BLOCK_ROWS,
    PIECE,
    VALUES_FOR_THREADS,
    float_products,
    products,
    quantise_rows,
    scale_products,
)

SHAPES = [(1, 1), (1, 63), (BLOCK_ROWS + 1, 64), (40, 577), (VALUES_FOR_THREADS // 1000 + 2, 1001)]


def quantise_plainly(x: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The slow twin; `round` takes halves to even, as the kernel does."""
    scaled = x * factors
    largest = scaled.abs().amax(dim=1)
    inverse = torch.where(largest > 0, 127 / largest, 0.0)
    return (scaled * inverse[:, None]).round().to(torch.int8), largest / 127


def rows(num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of both signs, some of them zero, and a positive factor for each column."""
    torch.manual_seed(num_rows * width)
    x = torch.randn(num_rows, width) * 10 ** torch.empty(num_rows, 1).uniform_(-4, 4)
    x[2::5] = 0
    return x, torch.rand(width) + 0.1


@pytest.mark.parametrize(("num_rows", "width"), SHAPES)
def test_rounded_rows_and_scales_equal_the_twin(num_rows: int, width: int) -> None:
    x, factors = rows(num_rows, width)
    got, scales = quantise_rows(x, factors)
    want, want_scales = quantise_plainly(x, factors)
    assert torch.equal(scales, want_scales)
    assert torch.equal(got, want)


@pytest.mark.parametrize(("num_rows", "width"), SHAPES)
def test_no_value_is_off_by_more_than_half_a_unit(num_rows: int, width: int) -> None:
    x, factors = rows(num_rows, width)
    got, scales = quantise_rows(x, factors)
    error = (got.double() * scales[:, None] - x.double() * factors).abs()
    assert (error <= 0.5001 * scales[:, None]).all()


def test_the_largest_value_of_a_row_becomes_127_of_its_sign() -> None:
    x = torch.tensor([[1.0, -4.0, 2.0], [0.3, 0.1, -0.2]])
    got, scales = quantise_rows(x, torch.ones(3))
    assert got.tolist() == [[32, -127, 64], [127, 42, -85]]
    torch.testing.assert_close(scales, torch.tensor([4.0, 0.3]) / 127)


def test_a_row_of_zeros_has_the_scale_zero() -> None:
    got, scales = quantise_rows(torch.zeros(2, 5), torch.ones(5))
    assert not got.any()
    assert not scales.any()


def test_views_are_read_by_their_strides() -> None:
    base, _ = rows(20, 90)
    factors = torch.rand(30) + 0.1
    for view in (base[:, 30:60], base[:, ::3], base[::2, :30]):
        want, want_scales = quantise_plainly(view, factors)
        got, scales = quantise_rows(view, factors)
        assert torch.equal(got, want)
        assert torch.equal(scales, want_scales)


@pytest.mark.parametrize(("num_rows", "width"), SHAPES)
def test_products_are_scaled_by_row_and_column(num_rows: int, width: int) -> None:
    torch.manual_seed(width)
    products = torch.randint(-(2**31), 2**31, (num_rows, width), dtype=torch.int32)
    row_scales, column_scales = torch.rand(num_rows), torch.rand(width)
    want = products.float() * (row_scales[:, None] * column_scales[None])
    assert torch.equal(scale_products(products, row_scales, column_scales), want)


@pytest.mark.parametrize("width", [1, 63, PIECE, PIECE + 1, 2 * PIECE + 500])
@pytest.mark.parametrize("num_outputs", [1, PIECE + 3])
def test_products_are_exact_by_integers_and_by_float32(width: int, num_outputs: int) -> None:
    torch.manual_seed(width)
    rows = torch.randint(-127, 128, (5, width), dtype=torch.int8)
    weight = torch.randint(-127, 128, (num_outputs, width), dtype=torch.int8)
    rows[0], weight[0] = 127, -127  # the largest sum there is
    want = (rows.long() @ weight.long().t()).int()
    assert torch.equal(products(rows, weight), want)
    assert torch.equal(float_products(rows, weight), want)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    x, factors = rows(150, 577)
    weight = torch.randint(-127, 128, (45, 577), dtype=torch.int8)
    column_scales = torch.rand(45)

    def product(some: torch.Tensor) -> torch.Tensor:
        quantised, scales = quantise_rows(some, factors)
        return scale_products(products(quantised, weight), scales, column_scales)

    together = product(x)
    assert torch.equal(together, torch.cat([product(row[None]) for row in x]))
    spoilt = x * torch.where(torch.arange(150) % 2 == 0, 1.0, 1e4)[:, None]
    assert torch.equal(product(spoilt)[::2], together[::2])
