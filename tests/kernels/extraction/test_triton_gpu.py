"""The Triton kernels on a GPU against the float64 reference; `fill` never synchronises."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from logprobe.kernels.extraction import reference
from logprobe.kernels.extraction.api import extract, fill
from logprobe.kernels.extraction.device import allocate, requests_on
from logprobe.kernels.extraction.requests import RowRequests, check_requests, check_rows
from logprobe.records.rows import KERNEL_EXTRAS, DeviceRows

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXTRAS = dict.fromkeys(KERNEL_EXTRAS, True)
VOCAB_SIZE = 128_256


def random_logits(
    seed: int, num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(num_rows, vocab_size, generator=generator)).to(dtype)


def assert_close(got: torch.Tensor, want: NDArray[Any], *, rtol: float = 1.2e-7, atol: float = 3e-6) -> None:
    np.testing.assert_allclose(got.cpu().double().numpy(), want.astype(np.float64), rtol=rtol, atol=atol)


def assert_like_the_twin(
    logits: torch.Tensor, k: int | list[int], given_ids: list[list[int]] | None = None
) -> None:
    """Assert that extraction on the GPU gives the results of the float64 reference on the host."""
    host = logits.cpu()
    chosen_ids = host.argsort(dim=1)[:, -min(3, host.shape[1])]
    got = extract(logits, chosen_ids, k, given_ids=given_ids, **EXTRAS)
    want = reference.extract(host, chosen_ids, k, given_ids=given_ids, dtype=np.float64, **EXTRAS)
    assert np.array_equal(got.is_valid.cpu(), want.is_valid)
    assert np.array_equal(got.ranks.cpu(), want.ranks)
    token_ids, logprobs = got.token_ids.cpu(), got.logprobs.cpu()
    for row, num in enumerate(want.num_logprobs.tolist()):
        assert np.array_equal(token_ids[row, : num + 1], want.token_ids[row, : num + 1])
        assert_close(logprobs[row, : num + 1], want.logprobs[row, : num + 1])
    assert_close(got.lse, want.lse)
    for name in KERNEL_EXTRAS:
        # The GPU's float32 exp is off by up to 2 ulp.
        assert_close(got.extras[name], want.extras[name], rtol=5e-7, atol=5e-6)
    if got.given is not None and want.given is not None:
        assert np.array_equal(got.given.ranks.cpu(), want.given.ranks)
        assert_close(got.given.logprobs, want.given.logprobs)


# Every k and every dtype, but not every pair: each compiles a separate kernel, which takes seconds.
@pytest.mark.parametrize(
    ("k", "dtype"),
    [(k, torch.float32) for k in (0, 1, 20, 100, 512, 1000, 5000)]
    + [(k, dtype) for k in (20, 1000, 5000) for dtype in (torch.bfloat16, torch.float16)],
)
def test_rows_of_a_real_vocabulary(k: int, dtype: torch.dtype) -> None:
    logits = random_logits(k, 3, VOCAB_SIZE, dtype)
    given_ids = [[0, VOCAB_SIZE - 1], [], list(range(100, 130))]
    assert_like_the_twin(logits.cuda(), k, given_ids)


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(seed: int) -> None:
    draw = np.random.default_rng(seed)
    num_rows = int(draw.integers(1, 7))
    vocab_size = int(draw.choice([1, 7, 2047, 2048, 2049, 50_257, 151_669, 262_144]))
    logits = random_logits(seed, num_rows, vocab_size, DTYPES[seed % 3])
    if draw.integers(2):
        logits = logits.float().round().to(logits.dtype)  # many ties
    k = draw.integers(1 + draw.choice([30, 128, 6000]), size=num_rows).tolist()
    given_ids = [draw.integers(vocab_size, size=draw.integers(20)).tolist() for _ in range(num_rows)]
    assert_like_the_twin(logits.cuda(), k, given_ids)


@pytest.mark.parametrize("k", [20, 1000, 2000])
def test_odd_rows(k: int) -> None:
    rows = random_logits(0, 9, 9000)
    rows[0] = 0.0
    rows[1, 10:] = -torch.inf
    rows[2, 5000] = torch.nan
    rows[3, 8999] = torch.inf
    rows[4] = -torch.inf
    rows[5] = torch.nan
    rows[6, ::2] = -0.0
    rows[6, 1::2] = 0.0
    rows[7, 2048:4096] = -torch.inf
    rows[7, 4096:] = -3e38
    assert_like_the_twin(rows.cuda(), k, [[1, 5000, 8999]] * 9)


def test_views_with_strides() -> None:
    logits = random_logits(1, 6, 6016).cuda()
    for view in (logits[::2], logits[:, 16:], logits[:, 7:], logits[:, :5001], logits[:, ::2], logits[1:2]):
        assert_like_the_twin(view, 20)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 50_257])
def test_a_row_has_the_same_bits_alone(vocab_size: int) -> None:
    logits = random_logits(2, 33, vocab_size).cuda()
    k = [20, 2000, 0] * 11  # the kernel, torch.topk, neither
    given_ids = [[1, 2, 3], [], list(range(9))] * 11
    together = extract(logits, [5] * 33, k, given_ids=given_ids, **EXTRAS)
    assert together.given is not None
    for row in (0, 1, 2, 31, 32):
        for own in (logits[row : row + 1], logits[row : row + 1].clone()):
            alone = extract(own, [5], k[row], given_ids=[given_ids[row]], **EXTRAS)
            width = k[row] + 1
            assert torch.equal(alone.token_ids[0], together.token_ids[row, :width])
            assert torch.equal(alone.logprobs[0], together.logprobs[row, :width])
            assert torch.equal(alone.lse[0], together.lse[row])
            assert all(torch.equal(alone.extras[name][0], together.extras[name][row]) for name in EXTRAS)
            entries = slice(*together.given.offsets[row : row + 2].tolist())
            assert alone.given is not None
            assert torch.equal(alone.given.logprobs, together.given.logprobs[entries])
            assert torch.equal(alone.given.ranks, together.given.ranks[entries])


def requests_of(logits: torch.Tensor, k: int, given_ids: list[int] | None = None) -> RowRequests:
    chosen_ids = np.zeros(len(logits), np.int32)
    return check_requests(check_rows(logits), chosen_ids, k, given_ids=given_ids, **EXTRAS)


@pytest.mark.parametrize("k", [0, 20, 1000, 5000])
def test_the_host_never_waits(k: int) -> None:
    logits = random_logits(3, 4, VOCAB_SIZE).cuda()
    extract(logits, [0] * 4, k, given_ids=[1, 2], **EXTRAS)  # compiles the kernel
    requests = requests_of(logits, k, [1, 2])
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = allocate(requests, logits.device)
        fill(logits, requests, output)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("k", [0, 20, 1000])
def test_a_cuda_graph_replays_it(k: int) -> None:
    logits = random_logits(4, 4, VOCAB_SIZE).cuda()
    requests = requests_on(requests_of(logits, k), logits.device)
    output = allocate(requests, logits.device)
    fill(logits, requests, output)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill(logits, requests, output)
    logits.copy_(random_logits(5, 4, VOCAB_SIZE))
    graph.replay()
    assert_same(output, extract(logits, [0] * 4, k, **EXTRAS))


def assert_same(got: DeviceRows, want: DeviceRows) -> None:
    assert torch.equal(got.token_ids, want.token_ids)
    assert torch.equal(got.logprobs, want.logprobs)
    assert torch.equal(got.ranks, want.ranks)
    assert torch.equal(got.lse, want.lse)
    assert all(torch.equal(got.extras[name], want.extras[name]) for name in want.extras)
