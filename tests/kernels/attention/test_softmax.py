"""The softmax of blocks of scores against numpy's own sums in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from logprobe.kernels.attention.numba.softmax import soften
from logprobe.kernels.layers.layout import PANEL

ONE_HIDES = 5  # the lane whose rows see nothing of the first block


@njit
def soften_block(scores: Any, largest: Any, totals: Any, factors: Any) -> Any:
    state = (largest.ctypes.data, totals.ctypes.data, factors.ctypes.data)
    return soften(scores.ctypes.data, len(scores), *state)


@pytest.mark.parametrize("spread", [1.0, 60.0, 1e6])
@pytest.mark.parametrize("sink", [None, 3.0])
def test_sums_go_on_from_block_to_block(spread: float, sink: float | None) -> None:
    rng = np.random.default_rng(1)
    blocks = [(spread * rng.standard_normal((keys, PANEL))).astype(np.float32) for keys in (1, 40, 96)]
    blocks[0][:, ONE_HIDES] = -np.inf
    blocks[1][3] = -np.inf
    wanted = np.concatenate([[np.full(PANEL, -np.inf if sink is None else sink)], *blocks])
    largest = wanted[0].astype(np.float32)
    totals = np.full(PANEL, float(sink is not None))
    weights = np.empty((0, PANEL))
    for scores in blocks:
        factors = np.full(PANEL, np.nan, np.float32)
        is_hidden = scores == -np.inf
        is_greater = soften_block(scores, largest, totals, factors)
        assert is_greater == (factors != 1).any()
        assert (scores[is_hidden] == 0).all()
        weights = np.concatenate([weights * factors, scores])
    assert np.array_equal(largest, wanted.max(0))
    exponentials = np.exp(wanted - wanted.max(0))
    np.testing.assert_allclose(totals, exponentials.sum(0), rtol=2e-6)
    np.testing.assert_allclose(weights, exponentials[1:], rtol=2e-6, atol=1e-25)


def test_nothing_is_scaled_where_no_score_is_greater() -> None:
    largest, totals = np.full(PANEL, 4, np.float32), np.ones(PANEL)
    factors = np.empty(PANEL, np.float32)
    assert not soften_block(np.full((3, PANEL), 4, np.float32), largest, totals, factors)
    assert (factors == 1).all()
    assert (totals == 4).all()


def test_weights_below_a_totals_last_float32_digit_count() -> None:
    largest, totals = np.zeros(PANEL, np.float32), np.ones(PANEL)
    factors = np.empty(PANEL, np.float32)
    for _ in range(40):
        soften_block(np.full((192, PANEL), -18, np.float32), largest, totals, factors)
    np.testing.assert_allclose(totals - 1, 40 * 192 * np.exp(-18), rtol=1e-6)


def test_what_is_not_a_number_stays_so_in_its_lane_alone() -> None:
    largest, totals = np.full(PANEL, -np.inf, np.float32), np.zeros(PANEL)
    scores = np.ones((2, PANEL), np.float32)
    scores[1, 7] = np.nan
    soften_block(scores, largest, totals, np.empty(PANEL, np.float32))
    assert np.isnan(totals[7])
    assert (np.delete(totals, 7) == 2).all()
