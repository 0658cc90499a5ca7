"""Rows of a step: one type for all layers, sliced without copies, without keeping wide blocks alive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from logprobe.kernels import extract
from logprobe.records.rows import GivenLists, HostRows, KeptLists


def some_rows(num_rows: int, k: int, *, seed: int = 0, **beside: Any) -> HostRows:
    random = np.random.default_rng(seed)
    ids = random.integers(0, 999, (num_rows, k + 1), dtype=np.int32)
    return HostRows(ids, -random.random((num_rows, k + 1), np.float32), ids[:, 0] + np.int32(1), **beside)


def named(num_rows: int) -> GivenLists:
    """Make rows where row n has n named ids."""
    offsets = np.cumsum([0, *range(num_rows)])
    ids = np.arange(offsets[-1], dtype=np.int32)
    return GivenLists.of(offsets, ids, -ids.astype(np.float32), ids + np.int32(1))


def memory_of(array: np.ndarray) -> int:
    """Return the bytes of the memory that an array keeps alive."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.nbytes


def test_a_range_of_rows_shares_the_block() -> None:
    whole = some_rows(8, 5, extras={"entropy": np.arange(8, dtype=np.float32)}, given=named(8))
    part = whole.rows(2, 5)
    assert len(part) == 3
    assert np.shares_memory(part.token_ids, whole.token_ids)
    np.testing.assert_array_equal(part.extras["entropy"], [2, 3, 4])
    assert part.given is not None
    assert part.given.offsets.tolist() == [0, 2, 5, 9]
    assert part.given.token_ids.tolist() == list(range(1, 10))


def test_a_narrow_row_keeps_no_wide_step() -> None:
    beside = {"extras": {"entropy": np.arange(4, dtype=np.float32)}, "given": named(4)}
    kept = KeptLists.of([np.arange(row, dtype=np.uint16) for row in range(4)])
    whole = some_rows(4, 5000, kept=kept, **beside)
    narrow = whole.narrowed(3)
    assert whole.narrowed(5000) is whole
    row = narrow.rows(1, 2)
    np.testing.assert_array_equal(row.token_ids, whole.token_ids[1:2, :4])
    np.testing.assert_array_equal(row.logprobs, whole.logprobs[1:2, :4])
    assert memory_of(row.token_ids) == memory_of(row.logprobs) == 4 * 4 * 4
    assert row.given is not None
    assert whole.given is not None
    # A device sends all columns as one array.
    mine = [row.ranks, row.extras["entropy"], *row.given.columns()]
    theirs = [whole.ranks, whole.extras["entropy"], *whole.given.columns()]
    assert not any(map(np.may_share_memory, mine, theirs))
    assert row.kept is not None
    assert (row.kept.token_ids.tolist(), memory_of(row.kept.token_ids)) == ([0], 2)


def test_runs_of_rows_are_joined_and_filled_up() -> None:
    first = some_rows(2, 1, extras={"entropy": np.float32([1, 2])})
    second = some_rows(3, 4, seed=1, given=named(3), kept=KeptLists.of([np.uint16([7])] * 3))
    joined = HostRows.joined([first, second])
    assert (len(joined), joined.k) == (5, 4)
    np.testing.assert_array_equal(joined.token_ids[:2], np.pad(first.token_ids, ((0, 0), (0, 3))))
    np.testing.assert_array_equal(joined.logprobs[2:], second.logprobs)
    np.testing.assert_array_equal(joined.extras["entropy"], [1, 2, np.nan, np.nan, np.nan])
    assert joined.given is not None
    assert joined.given.offsets.tolist() == [0, 0, 0, 0, 1, 3]
    assert joined.kept is not None
    assert [run.tolist() for run in joined.kept.runs()] == [[], [], [7], [7], [7]]
    assert HostRows.joined([first]) is first


@pytest.mark.parametrize("is_sent", [False, True])
def test_rows_of_a_kernel_come_to_the_host_as_they_are(is_sent: bool) -> None:
    logits = np.random.default_rng(3).normal(size=(6, 50)).astype(np.float32)
    logits[4, 7] = np.nan
    device = extract(logits, [1, 2, 3, 4, 5, 6], 3, given_ids=[9, 8], entropy=True)
    host = device.arriving(lambda packed: lambda: packed)() if is_sent else device.to_host()
    assert host.is_valid.tolist() == device.is_valid.tolist() == [True] * 4 + [False, True]
    np.testing.assert_array_equal(host.logprobs, device.logprobs)
    np.testing.assert_array_equal(host.extras["entropy"], device.entropy)
    part, cut = host.rows(2, 4), device.rows(2, 4)
    np.testing.assert_array_equal(part.token_ids, cut.token_ids)
    assert part.given is not None
    assert device.given is not None
    np.testing.assert_array_equal(part.given.ranks, device.given.ranks[4:8])
