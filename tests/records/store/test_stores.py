from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from logprobe.records import FlatLogprobs, Logprob


def both_layouts(arrays: Any) -> list[FlatLogprobs]:
    packed, ragged = FlatLogprobs([None]), FlatLogprobs()
    packed.append_rows(*arrays)
    ragged.append_entries(packed.arrays)
    assert ragged.to_bytes() != packed.to_bytes()
    return [packed, ragged]


def test_the_chosen_tokens_and_the_k_best_are_read_as_arrays(step: Any) -> None:
    ids, logprobs, ranks = step(200, 20, 90)
    for flat in both_layouts((ids, logprobs, ranks)):
        chosen, top = flat.chosen_entries(), flat.top_entries()
        assert chosen.offsets.tolist() == list(range(202))
        assert chosen.token_ids.tolist() == [None, *ids[:, 0].tolist()]
        assert chosen.logprobs.tolist() == [None, *logprobs[:, 0].tolist()]
        assert chosen.rank_list() == [None, *ranks.tolist()]
        is_settled = ranks != 21  # a record of dicts cannot distinguish rank k + 1 from a k + 1st entry
        lengths = np.diff(top.offsets)[1:]
        assert set(lengths[is_settled]) == {20}
        for row in np.flatnonzero(is_settled):
            start = top.offsets[row + 1]
            np.testing.assert_array_equal(top.token_ids[start : start + 20], ids[row, 1:])
            np.testing.assert_array_equal(top.logprobs[start : start + 20], logprobs[row, 1:])


@pytest.mark.parametrize("k", [0, 1, 20, 40])
def test_the_mass_outside_the_entries_is_what_is_left(step: Any, k: int) -> None:
    arrays = step(50, k, 40)
    for flat in both_layouts(arrays):
        rest = flat.other_logprob
        assert rest.dtype == np.float32
        assert np.isnan(rest[0])
        for row, position in enumerate(flat):
            if position:
                listed = sum(np.exp(np.float64(value.logprob)) for value in position.values())
                assert np.exp(np.float64(rest[row])) == pytest.approx(1 - listed, abs=3e-7)


@pytest.mark.parametrize("k", [0, 1, 20, 40])
def test_the_mass_outside_the_k_best_counts_a_chosen_token_outside(step: Any, k: int) -> None:
    ids, logprobs, ranks = step(50, k, 40)
    for flat in both_layouts((ids, logprobs, ranks)):
        rest = flat.outside_top_logprob
        assert rest.dtype == np.float32
        assert np.isnan(rest[0])
        best = np.exp(logprobs[:, 1:].astype(np.float64)).sum(axis=1)
        is_settled = ranks != k + 1  # a record of dicts cannot distinguish it from a k + 1st entry
        np.testing.assert_allclose(
            np.exp(rest[1:].astype(np.float64))[is_settled], 1 - best[is_settled], atol=3e-7
        )
        is_outside = (ids[:, 1:] != ids[:, :1]).all(axis=1)
        assert (rest[1:] >= logprobs[:, 0])[is_outside & is_settled].all()
        inside = np.exp(rest[1:].astype(np.float64)[~is_outside])
        np.testing.assert_allclose(inside, np.exp(flat.other_logprob[1:][~is_outside]), atol=1e-7)


def test_a_chosen_token_has_its_mass_where_rounding_leaves_the_best_all() -> None:
    for flat in both_layouts(([[2, 1]], [[-30.0, 0.0]], [3])):
        assert flat.outside_top_logprob.tolist()[1] == -30.0


def test_a_small_rest_keeps_its_digits_and_no_rest_is_minus_infinity() -> None:
    flat = FlatLogprobs([{1: Logprob(-1e-12, 1)}, {1: Logprob(0.0, 1)}, {}, {1: Logprob(-np.inf, 1)}])
    flat.append_fast([1, 1, 2], [np.log(0.25), np.log(0.25), np.log(0.5)], [2, 2, 1], [None] * 3)
    np.testing.assert_allclose(flat.other_logprob, [np.log(1e-12), -np.inf, 0, 0, np.log(0.25)], rtol=1e-6)
    packed = FlatLogprobs()
    packed.append_rows([[1, 1], [1, 1], [2, 1]], [[-1e-12, -1e-12], [0, 0], [-np.inf, -np.inf]], [1, 1, 2])
    np.testing.assert_allclose(packed.other_logprob, [np.log(1e-12), -np.inf, 0], rtol=1e-6)


@pytest.mark.parametrize("read", ["arrays", "chosen_entries", "top_entries"])
@pytest.mark.parametrize("count", [1, 100])
def test_what_a_caller_writes_to_columns_that_were_read_is_not_written_to_the_record(
    step: Any, read: str, count: int
) -> None:
    flat = FlatLogprobs()
    flat.append_rows(*step(count, 1, 90))
    before, entries = list(flat), getattr(flat, read)
    entries = entries() if callable(entries) else entries
    for column in (entries.token_ids, entries.logprobs, entries.ranks):
        column[:] = 0
    assert list(flat) == before
