from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from logprobe.errors import ParameterError
from logprobe.records import FlatLogprobs, cut_to_mass


def whole_rows(rng: np.random.Generator, n: int, vocab_size: int) -> np.ndarray:
    logits = rng.normal(size=(n, vocab_size)) * 3
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9, 0.999, 1.0])
def test_the_set_kept_is_the_smallest_that_holds_the_mass(rng: np.random.Generator, mass: float) -> None:
    rows = whole_rows(rng, 30, 200)
    chosen = rng.integers(0, 200, 30)
    record = cut_to_mass(rows, chosen, mass)
    for row, token_id, position, rest in zip(
        rows, chosen.tolist(), record, record.other_logprob, strict=True
    ):
        assert next(iter(position)) == token_id
        assert position[token_id].rank == 1 + np.count_nonzero(row > row[token_id])
        assert all(value.logprob == row[token] for token, value in position.items())
        ranked = np.sort(np.exp(row.astype(np.float64)))[::-1]
        needed = int(np.searchsorted(np.cumsum(ranked), mass)) + 1
        assert min(needed, 200) <= len(position) <= min(needed, 200) + 1
        if mass < 1:
            assert np.exp(np.float64(rest)) <= 1 - mass + 1e-6


def test_ties_are_cut_by_ascending_id() -> None:
    rows = np.log(np.full((1, 4), 0.25, np.float32))
    assert list(cut_to_mass(rows, [3], 0.4)[0]) == [3, 0, 1]


def test_impossible_tokens_cost_nothing_short_of_the_whole() -> None:
    rows = np.array([[0.0, -np.inf, -np.inf]], np.float32)
    assert list(cut_to_mass(rows, [0], 0.999)[0]) == [0]


@pytest.mark.parametrize(
    ("rows", "chosen", "mass", "parameter"),
    [
        (np.zeros((1, 3)), [0], 0.0, "mass"),
        (np.zeros((1, 3)), [0], 1.1, "mass"),
        (np.zeros((1, 3)), [0, 1], 0.5, "chosen_ids"),
        (np.zeros(3), [0], 0.5, "chosen_ids"),
        (np.zeros((1, 3)), [-1], 0.5, "chosen_ids"),
        (np.zeros((1, 3)), [3], 0.5, "chosen_ids"),
        (np.zeros((1, 3)), [0.5], 0.5, "chosen_ids"),
        (np.array([[np.nan, 0.0]]), [0], 0.5, "logprobs"),
    ],
)
def test_what_cannot_be_cut_is_refused(rows: Any, chosen: Any, mass: float, parameter: Any) -> None:
    with pytest.raises(ParameterError) as error:
        cut_to_mass(rows, chosen, mass)
    assert error.value.parameter == parameter


def test_a_cut_row_is_a_fraction_of_the_whole(rng: np.random.Generator) -> None:
    rows = whole_rows(rng, 20, 5000)
    cut, whole = cut_to_mass(rows, np.zeros(20, int), 0.5), FlatLogprobs()
    order = np.argsort(-rows, axis=1, kind="stable")
    ids = np.column_stack([np.zeros(20, int), order])
    ranks = 1 + (rows > rows[:, :1]).sum(axis=1)
    whole.append_rows(ids, np.take_along_axis(rows, ids, axis=1), ranks)
    assert whole.num_entries == 20 * 5000
    assert whole.nbytes == 20 * (5001 * 6 + 2)  # the chosen token, all tokens, and a rank
    assert cut.nbytes < whole.nbytes / 10
