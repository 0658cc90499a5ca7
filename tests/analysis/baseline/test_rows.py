"""Compressed rows against whole ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.analysis.baseline.rows import (
    IMPOSSIBLE,
    MAX_SCALE,
    SCALES,
    KeptRows,
    Packed,
    drawn_codes,
    kept_within,
    pack,
    unpack,
)
from logprobe.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def rows_of(num_rows: int, size: int, *, spread: float = 3.0, seed: int = 0) -> NDArray[np.float64]:
    logits = np.random.default_rng(seed).normal(0, spread, (num_rows, size))
    return normalised(logits)


def normalised(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    best = logits.max(axis=1, keepdims=True)
    return logits - best - np.log(np.exp(logits - best).sum(axis=1, keepdims=True))


def moved(rows: NDArray[np.float64], amount: float) -> NDArray[np.float64]:
    return normalised(rows + np.random.default_rng(7).normal(0, amount, rows.shape))


def true_kl(rows: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    kl: NDArray[np.float64] = np.sum(np.exp(rows) * (rows - others), axis=1)
    return kl


def against(kept: KeptRows, others: NDArray[np.float64]) -> Any:
    return np.array([kept.against(row, other) for row, other in enumerate(others)]).T


@pytest.mark.parametrize("scale", [1, 2, 37, 1682, MAX_SCALE])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 1000)])
def test_codes_come_back_from_their_bytes(scale: int, shape: tuple[int, int]) -> None:
    rows = rows_of(*shape)
    rows[0, 0] = 0.0 if shape[1] == 1 else -np.inf
    codes = drawn_codes(rows, scale, 0)
    assert codes[codes != IMPOSSIBLE].max(initial=0) <= scale + 1
    assert np.array_equal(unpack(pack(codes), *shape), codes)


def test_codes_are_the_row_in_the_mean() -> None:
    row = rows_of(1, 40)
    draws = [drawn_codes(row, 9, number).astype(np.float64) for number in range(4000)]
    mean = np.mean([(codes / 9) ** 2 for codes in draws], axis=0)
    # The variance of each entry is at most p / n².
    errors = np.sqrt(np.exp(row) / 81 / len(draws))
    assert np.abs((mean - np.exp(row)) / errors).max() < 4.5
    spreads = np.var([(codes / 9) ** 2 for codes in draws], axis=0) / (np.exp(row) / 81)
    assert np.mean(spreads) < 1.05


@pytest.mark.parametrize("amount", [0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("spread", [0.2, 2.0, 4.0])
def test_the_divergence_is_within_its_error_and_has_no_bias(spread: float, amount: float) -> None:
    rows = rows_of(200, 2000, spread=spread)
    others = moved(rows, amount)
    kl, errors, acceptance, acceptance_errors = against(kept_within(rows, 200 * 400, 0)[0], others)
    apart = kl - true_kl(rows, others)
    assert np.abs(apart / errors).max() < 5
    # Errors of rows are independent: that of the mean is smaller by the square root of their number.
    assert abs(apart.sum()) < 4 * np.sqrt((errors**2).sum())
    shared = np.minimum(np.exp(rows), np.exp(others)).sum(axis=1)
    assert (np.abs(acceptance - shared) <= acceptance_errors + 1e-6).all()


def test_the_error_falls_as_the_scale_rises() -> None:
    rows = rows_of(50, 1000)
    others = moved(rows, 0.1)
    found = [
        against(KeptRows.of(rows, drawn_codes(rows, scale, 0), scale), others) for scale in (50, 500, 5000)
    ]
    stated = [errors.mean() for _, errors, *_ in found]
    made = [np.sqrt(np.mean((kl - true_kl(rows, others)) ** 2)) for kl, *_ in found]
    assert stated[0] > 5 * stated[1] > 25 * stated[2]
    assert made[0] > 5 * made[1] > 25 * made[2]


def test_impossible_tokens_of_either_row() -> None:
    rows = rows_of(2, 50)
    rows[:, 3] = -np.inf
    rows = normalised(rows)
    kept = KeptRows.of(rows, drawn_codes(rows, 500, 0), 500)
    others = rows.copy()
    kl, errors, *_ = against(kept, others)
    assert np.isfinite(kl).all()
    assert np.abs(kl).max() <= 5 * errors.max()
    others[0, 4] = -np.inf  # impossible only in the other, however unlikely
    kl, _, acceptance, _ = against(kept, others)
    assert kl[0] == np.inf
    assert np.isfinite(kl[1])
    assert np.isfinite(acceptance).all()


def test_rows_are_kept_within_their_bytes() -> None:
    rows = rows_of(16, 8000, spread=2.5)
    for limit in (16 * 400, 16 * 1600, 16 * 6400):
        kept, packed = kept_within(rows, limit, 0)
        assert packed.num_bytes <= limit
        finer = SCALES[max(SCALES.index(kept.scale) - 3, 0)]
        assert kept.scale == SCALES[0] or pack(drawn_codes(rows, finer, 0)).num_bytes > limit
    coarse, _ = kept_within(rows, 0, 0)
    assert coarse.scale == SCALES[-1]


def test_bytes_of_other_rows_are_refused() -> None:
    codes = drawn_codes(rows_of(3, 500), 100, 0)
    packed = pack(codes)
    for shape in ((3, 499), (3, 501), (2, 500), (1 << 10, 1 << 20)):
        with pytest.raises(InputError, match="is damaged"):
            unpack(packed, *shape)
    for planes in (packed.planes[:-1], packed.planes + b"\0", b""):
        with pytest.raises(InputError, match="is damaged"):
            unpack(packed._replace(planes=planes), *codes.shape)
    for lengths in (b"", packed.lengths[:-3], packed.lengths + b"\0", b"\xff" * 40):
        with pytest.raises(InputError, match="is damaged"):
            unpack(Packed(lengths, packed.planes), *codes.shape)


def test_the_facts_of_a_row_are_what_their_names_say() -> None:
    rows = rows_of(5, 300)
    scale = 40
    codes = drawn_codes(rows, scale, 3)
    kept = KeptRows.of(rows, codes, scale)
    for row in range(5):
        p = np.exp(rows[row])
        drawn = (codes[row] / scale) ** 2
        assert kept.cross[row] == pytest.approx(sum(w * x for w, x in zip(drawn, rows[row], strict=True)))
        is_low = codes[row] < 2
        assert kept.low_mass[row] == pytest.approx(p[is_low].sum())
        even = np.where(is_low, p[is_low].sum() / is_low.sum(), drawn)
        above, below = np.maximum(p - even, 0).sum(), np.maximum(even - p, 0).sum()
        assert kept.distance[row] == pytest.approx(max(above, below), rel=1e-6)
    again = replace(kept, codes=drawn_codes(rows, scale, 3))
    assert np.array_equal(again.codes, codes)
    assert not np.array_equal(drawn_codes(rows, scale, 4), codes)
