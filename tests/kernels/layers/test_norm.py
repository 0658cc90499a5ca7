import pytest
import torch
from torch.nn.functional import layer_norm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from logprobe.kernels.layers.rows import MAX_ROWS, ROWS_FOR_THREADS, norm_stage
from norms import rms_norm

RELATIVE = 2e-6
EPSILON = 1e-6
ROWS = [1, ROWS_FOR_THREADS - 1, ROWS_FOR_THREADS, 700]
WIDTHS = [1, 7, 64, 577]


def rows(num_rows: int, width: int) -> torch.Tensor:
    """Make rows of very different magnitudes, as in the residual stream."""
    generator = torch.Generator().manual_seed(num_rows + width)
    scales = 10 ** torch.empty(num_rows, 1).uniform_(-3, 3, generator=generator)
    return torch.randn(num_rows, width, generator=generator) * scales


def weights(width: int) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(width))


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=RELATIVE, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_rows_equal_the_norm_of_llama(num_rows: int, width: int) -> None:
    norm = LlamaRMSNorm(width, eps=EPSILON)
    norm.weight.copy_(weights(width))
    x = rows(num_rows, width)
    assert_close(rms_norm(x, norm.weight, EPSILON), norm(x))


@torch.no_grad()
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_with_one_added_to_the_weight_rows_equal_the_norm_of_gemma(num_rows: int, width: int) -> None:
    norm = Gemma2RMSNorm(width, eps=EPSILON)
    norm.weight.copy_(weights(width))
    x = rows(num_rows, width)
    assert_close(rms_norm(x, norm.weight + 1, EPSILON), norm(x))


@torch.no_grad()
def test_views_are_read_by_their_strides() -> None:
    weight, base = weights(60), rows(40, 240)
    norm = LlamaRMSNorm(60, eps=EPSILON)
    norm.weight.copy_(weight)
    heads = base.view(1, 40, 4, 60).transpose(1, 2)
    for view in (base[:, 60:120], base[::3, :60], base[:, ::4], heads):
        assert not view.is_contiguous()
        got = rms_norm(view, weight, EPSILON)
        assert got.shape == view.shape
        assert_close(got, norm(view))


def test_the_input_stays_as_it_was() -> None:
    x = rows(70, 33)
    before = x.clone()
    rms_norm(x, weights(33), EPSILON)
    assert torch.equal(x, before)


def test_epsilon_is_what_small_rows_are_divided_by() -> None:
    x = torch.full((1, 8), 1e-3)
    got = rms_norm(x, torch.ones(8), 3e-6)
    torch.testing.assert_close(got, torch.full((1, 8), 0.5), rtol=RELATIVE, atol=0)


def test_a_row_of_zeros_gives_zeros() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 9), weights(9), EPSILON), torch.zeros(2, 9))


def test_no_rows_give_no_rows() -> None:
    assert rms_norm(torch.empty(0, 9), weights(9), EPSILON).shape == (0, 9)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    x, weight = rows(3 * MAX_ROWS + 50, 577), weights(577)
    together = rms_norm(x, weight, EPSILON)
    alone = torch.cat([rms_norm(row[None], weight, EPSILON) for row in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_no_number_spoils_its_own_row_alone(bad: float) -> None:
    x = rows(4, 50)
    x[2, 17] = bad
    got = rms_norm(x, weights(50), EPSILON)
    assert got[2, 17].isnan()
    assert got[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS + 1])
def test_parts_of_wider_rows_are_normed_in_place(num_rows: int) -> None:
    base, weight = rows(num_rows, 100), weights(20)
    want = rms_norm(base[:, 20:80].unflatten(1, (3, 20)), weight, EPSILON).flatten(1)
    got = base.clone()
    norm_stage(got[:, 20:80], weight, got[:, 20:80], EPSILON).run()
    assert torch.equal(got[:, 20:80], want)
    assert torch.equal(got[:, :20], base[:, :20])
    assert torch.equal(got[:, 80:], base[:, 80:])


def test_a_residual_is_added_where_it_stands() -> None:
    x, weight, residual = rows(40, 33), weights(33), rows(40, 33) + 1
    want = residual + rms_norm(x, weight, EPSILON)
    norm_stage(x, weight, residual, EPSILON, residual).run()
    assert torch.equal(residual, want)


def centred(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float = EPSILON
) -> torch.Tensor:
    out = torch.empty_like(x)
    norm_stage(x, weight, out, epsilon, bias=bias, is_centred=True).run()
    return out


def assert_centred(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
) -> None:
    """Assert closeness to float64, up to the float32 rounding of the row's mean."""
    bias = None if bias is None else bias.double()
    want = layer_norm(x.double(), weight.shape, weight.double(), bias, epsilon)
    deviations = (x.double().var(dim=1, correction=0, keepdim=True) + epsilon).sqrt()
    lost = x.double().abs().amax(dim=1, keepdim=True) / deviations * weight.abs() + want.abs() + 1
    assert ((got - want).abs() <= RELATIVE * lost).all()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", [1, 700])
def test_centred_rows_are_the_layer_norm_of_float64(num_rows: int, width: int, *, has_bias: bool) -> None:
    x, weight = rows(num_rows, width), weights(width)
    bias = weights(width + 1)[:width] if has_bias else None
    assert_centred(centred(x, weight, bias), x, weight, bias, EPSILON)


def test_centred_rows_far_from_zero_keep_their_digits() -> None:
    x = 1024 + torch.randn(20, 577, generator=torch.Generator().manual_seed(1))
    weight, bias = weights(577), weights(577)
    want = layer_norm(x.double(), weight.shape, weight.double(), bias.double(), EPSILON)
    # From a mean square of 2^20, float32 gets the variance of 1 only to a tenth; it has the mean to 2^-14.
    torch.testing.assert_close(centred(x, weight, bias).double(), want, rtol=2e-3, atol=2e-3)


def test_epsilon_is_added_to_the_variance_of_a_centred_row() -> None:
    x = torch.tensor([[5.001, 4.999] * 4])
    weight = torch.ones(8)
    got = centred(x, weight, None, 3e-6)
    assert_centred(got, x, weight, None, 3e-6)
    torch.testing.assert_close(got.abs(), torch.full((1, 8), 0.5), rtol=1e-3, atol=0)


def test_a_centred_row_has_the_same_bits_alone_and_among_others() -> None:
    x, weight, bias = rows(3 * MAX_ROWS + 50, 577), weights(577), weights(577)
    alone = torch.cat([centred(row[None], weight, bias) for row in x])
    assert torch.equal(centred(x, weight, bias), alone)


@pytest.mark.parametrize("has_bias", [True, False])
def test_parts_of_wider_rows_are_centred_in_place_and_added_to_a_residual(*, has_bias: bool) -> None:
    base, weight = rows(40, 100), weights(20)
    bias = weights(20) + 1 if has_bias else None
    parts = base[:, 20:80].reshape(120, 20)
    want = centred(parts, weight, bias).view(40, 60)
    got = base.clone()
    norm_stage(got[:, 20:80], weight, got[:, 20:80], EPSILON, bias=bias, is_centred=True).run()
    assert torch.equal(got[:, 20:80], want)
    assert torch.equal(got[:, :20], base[:, :20])
    assert torch.equal(got[:, 80:], base[:, 80:])
    residual = torch.full((40, 60), 0.25)
    norm_stage(base[:, 20:80], weight, residual, EPSILON, residual, bias=bias, is_centred=True).run()
    assert torch.equal(residual, want + 0.25)


def test_a_constant_centred_row_gives_the_bias() -> None:
    bias = weights(8)
    assert torch.equal(centred(torch.full((2, 8), 3.0), weights(8), bias), bias.expand(2, 8))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_no_number_spoils_its_own_centred_row_alone(bad: float) -> None:
    x = rows(4, 50)
    x[2, 17] = bad
    got = centred(x, weights(50), None)
    assert got[2].isnan().any()
    assert got[[0, 1, 3]].isfinite().all()
