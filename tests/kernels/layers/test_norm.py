import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from logprobe.kernels.layers.norm import BLOCK_ROWS, ROWS_FOR_THREADS, norm_stage, rms_norm

RELATIVE = 2e-6
EPSILON = 1e-6
ROWS = [1, ROWS_FOR_THREADS - 1, ROWS_FOR_THREADS, 700]
WIDTHS = [1, 7, 64, 577]


def rows(num_rows: int, width: int) -> torch.Tensor:
    """Rows of very different sizes, as the residual stream has them."""
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
    x, weight = rows(3 * BLOCK_ROWS + 50, 577), weights(577)
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


@pytest.mark.parametrize("num_rows", [1, BLOCK_ROWS + 1])
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
