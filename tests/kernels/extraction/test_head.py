import functools
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from logprobe.errors import ParameterError
from logprobe.kernels import extract, head_extract
from logprobe.kernels.extraction.head import default_chunk_rows

close = functools.partial(np.testing.assert_allclose, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [None, 1, 7, 100])
def test_chunked_head_equals_one_shot(chunk_rows: int | None) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(50, 8), torch.nn.Linear(8, 300)
    chosen, k = torch.randint(300, (50,)), torch.arange(50) % 7
    given = [[1, 2, 2] if row % 3 else None for row in range(50)]
    got = head_extract(hidden, head, chosen, k, given_ids=given, entropy=True, chunk_rows=chunk_rows)
    want = extract(head(hidden), chosen, k, given_ids=given, entropy=True)
    for row, num in enumerate(k.tolist()):
        assert np.array_equal(got.token_ids[row, : num + 1], want.token_ids[row, : num + 1])
        close(got.logprobs[row, : num + 1], want.logprobs[row, : num + 1])
    close(got.lse, want.lse)
    close(got.entropy, want.entropy)
    assert np.array_equal(got.ranks, want.ranks)
    assert got.given is not None
    assert want.given is not None
    close(got.given.logprobs, want.given.logprobs)
    assert np.array_equal(got.given.ranks, want.given.ranks)


def test_transform_sees_each_row_once_and_replaces_its_logits() -> None:
    hidden = torch.randn(20, 4)
    head = torch.nn.Linear(4, 9)
    seen: list[int] = []

    def reverse(logits: torch.Tensor, rows: slice) -> torch.Tensor:
        seen.extend(range(20)[rows])
        return logits.flip(1)

    got = head_extract(hidden, head, [0] * 20, 3, chunk_rows=6, transform=reverse)
    want = head_extract(hidden, head, [8] * 20, 3)
    assert seen == list(range(20))
    assert np.array_equal(8 - got.token_ids, want.token_ids)


def test_no_rows_give_no_rows() -> None:
    got = head_extract(torch.empty(0, 4), torch.nn.Linear(4, 9), [], 3)
    assert got.token_ids.shape == (0, 1)


@pytest.mark.parametrize(
    ("parameter", "hidden", "options"),
    [("hidden", torch.zeros(4), {}), ("chunk_rows", torch.zeros(1, 4), {"chunk_rows": 0})],
)
def test_wrong_arguments_are_named(parameter: str, hidden: torch.Tensor, options: dict[str, int]) -> None:
    with pytest.raises(ParameterError, match=parameter):
        head_extract(hidden, torch.nn.Linear(4, 9), [0], 3, **options)


def test_one_chunk_of_logits_is_held_at_a_time() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        assert all(logits() is None for logits in made)
        logits = rows @ torch.ones(4, 9)
        made.append(weakref.ref(logits))
        return logits

    head_extract(torch.randn(20, 4), head, [0] * 20, 3, chunk_rows=6)
    assert len(made) == 4


MEASURE_PEAK = """
import torch, resource, sys
from logprobe.kernels import head_extract, threads
threads.set_num_threads(1)
vocab_size, rows = int(sys.argv[1]), int(sys.argv[2])
head = torch.nn.Linear(8, vocab_size)
def soft_cap(logits, _rows):
    return logits.div_(30).tanh_().mul_(30)
def run(rows):
    hidden = torch.randn(rows, 8)
    return head_extract(hidden, head, torch.zeros(rows, dtype=torch.long), 20, transform=soft_cap)
run(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(rows)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize(("vocab_size", "rows"), [(49152, 2000), (262144, 400)])
def test_peak_memory_stays_below_64_mib_where_all_logits_would_take_400(vocab_size: int, rows: int) -> None:
    command = [sys.executable, "-c", MEASURE_PEAK, str(vocab_size), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) / 1024 < 64


@pytest.mark.parametrize(
    ("vocab_size", "rows"), [(None, 32), (49152, 42), (151936, 32), (262144, 32), (1_000_000, 8), (10**8, 1)]
)
def test_a_chunk_of_logits_has_8_mib_or_32_rows(vocab_size: int | None, rows: int) -> None:
    assert default_chunk_rows(vocab_size) == rows
