"""Measures against written-out definitions and numbers worked out by hand."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from logprobe.analysis import measures
from logprobe.errors import MissingPackageError, ParameterError

HALVES = np.log([0.5, 0.25, 0.125, 0.125])
UNIFORM = np.log(np.full(8, 1 / 8))
ONE = np.array([0.0, -np.inf, -np.inf])
LOGITS = arrays(np.float64, (3, 7), elements=st.floats(-30, 30))


def softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def test_sums_and_means_of_chosen_tokens() -> None:
    logprob = measures.total([-1.0, -2.0, -3.0])
    assert logprob == -6
    assert measures.per_unit(logprob, 3) == -2
    assert measures.perplexity(logprob, 3) == pytest.approx(math.e**2)
    assert measures.bits_per_byte(logprob, 12) == pytest.approx(0.5 / math.log(2))
    assert measures.pmi(-2.0, -5.0) == 3


def test_nothing_has_no_mean() -> None:
    assert measures.per_unit(0.0, 0) is None
    assert measures.perplexity(0.0, 0) is None
    assert measures.bits_per_byte(0.0, 0) is None
    assert measures.rank_stats([]) is None


def test_an_impossible_token_is_minus_infinity() -> None:
    logprob = measures.total([-1.0, -math.inf])
    assert logprob == -math.inf
    assert measures.perplexity(logprob, 2) == math.inf
    assert measures.bits_per_byte(logprob, 2) == math.inf
    assert measures.pmi(logprob, -3.0) == -math.inf
    assert measures.pmi(-3.0, logprob) == math.inf
    assert math.isnan(measures.pmi(logprob, logprob))


def test_a_perplexity_that_no_float_holds_is_infinite() -> None:
    assert measures.perplexity(-800.0, 1) == math.inf


def test_ranks_of_chosen_tokens() -> None:
    assert measures.is_greedy([1, 1])
    assert not measures.is_greedy([1, 2])
    stats = measures.rank_stats([1, 2, 10, 11])
    assert stats is not None
    assert (stats.mean, stats.median) == (6, 6)
    assert (stats.top_1, stats.top_5, stats.top_10) == (0.25, 0.5, 0.75)
    assert stats.mean_reciprocal == pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 11) / 4)


@pytest.mark.parametrize(
    ("name", "options", "halves", "uniform", "one"),
    [
        ("entropy", {}, 1.75 * math.log(2), math.log(8), 0.0),
        # Surprisals of 1, 2, 3, 3 bits with mean 1.75: 0.5 · 0.75² + 0.25 · 0.25² + 0.25 · 1.25².
        ("varentropy", {}, 0.6875 * math.log(2) ** 2, 0.0, 0.0),
        ("renyi_entropy", {"order": 0}, math.log(4), math.log(8), 0.0),
        ("renyi_entropy", {"order": 1}, 1.75 * math.log(2), math.log(8), 0.0),
        ("renyi_entropy", {"order": 2}, -math.log(0.25 + 1 / 16 + 2 / 64), math.log(8), 0.0),
        ("renyi_entropy", {"order": math.inf}, math.log(2), math.log(8), 0.0),
        ("self_certainty", {}, 2.25 * math.log(2) - math.log(4), 0.0, math.inf),
        ("top_p_size", {"mass": 0.5}, 1, 4, 1),
        ("top_p_size", {"mass": 0.51}, 2, 5, 1),
        ("top_p_size", {"mass": 1.0}, 4, 8, 1),
    ],
)
def test_a_measure_of_rows_worked_by_hand(
    name: str, options: dict[str, float], halves: float, uniform: float, one: float
) -> None:
    for row, want in ((HALVES, halves), (UNIFORM, uniform), (ONE, one)):
        measure = getattr(measures, name)
        assert measure(row, **options) == pytest.approx(want, abs=1e-12)
        assert measure(row[None, None], **options).shape == (1, 1)


@given(LOGITS, LOGITS)
def test_measures_of_rows_equal_their_definitions(logits: np.ndarray, others: np.ndarray) -> None:
    rows, other = softmax(logits), softmax(others)
    for row, entropy, varentropy, certainty, kl in zip(
        rows,
        measures.entropy(rows),
        measures.varentropy(rows),
        measures.self_certainty(rows),
        measures.kl_divergence(rows, other),
        strict=True,
    ):
        probabilities = [math.exp(value) for value in row]
        want = -sum(p * math.log(p) for p in probabilities if p)
        assert entropy == pytest.approx(want, abs=1e-9)
        assert varentropy == pytest.approx(
            sum(p * (math.log(p) + want) ** 2 for p in probabilities if p), abs=1e-9
        )
        assert certainty == pytest.approx(sum((-math.log(7) - value) / 7 for value in row), abs=1e-9)
        assert kl >= -1e-9
    np.testing.assert_allclose(measures.kl_divergence(rows, rows), 0, atol=1e-12)


@given(LOGITS, st.floats(0.01, 1.0))
def test_the_top_p_size_holds_the_mass_and_one_less_does_not(logits: np.ndarray, mass: float) -> None:
    rows = softmax(logits)
    for row, size in zip(rows, measures.top_p_size(rows, mass), strict=True):
        best = np.sort(np.exp(row))[::-1]
        assert best[:size].sum() >= mass - 1e-9
        assert size == 1 or best[: size - 1].sum() < mass


def test_the_rank_counts_strictly_more_likely_tokens() -> None:
    assert measures.ranks(np.stack([HALVES] * 3), [0, 2, 3]).tolist() == [1, 3, 3]


def test_the_mass_of_some_tokens() -> None:
    assert measures.log_mass(HALVES, [False, True, True, False]) == pytest.approx(math.log(0.375))
    assert measures.log_mass(ONE, [False, True, True]) == -math.inf
    assert measures.log_mass(ONE, [False] * 3) == -math.inf


def test_choices_and_standard_errors() -> None:
    assert measures.choice_probabilities([-1.0, -1.0, -math.inf]).tolist() == [0.5, 0.5, 0.0]
    assert measures.mean_and_error([1.0]) == (1.0, None)
    mean, error = measures.mean_and_error([1, 0, 0, 1])
    assert mean == 0.5
    assert error == pytest.approx(math.sqrt(1 / 3) / 2)


def test_calibration_worked_by_hand() -> None:
    found = measures.calibration([0.05, 0.95, 0.85, 0.85, 1.0], [0, 1, 1, 0, 0], num_bins=10)
    assert found.counts.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 2, 2]
    # |0.05 - 0| · 1 + |0.85 - 0.5| · 2 + |0.975 - 0.5| · 2, over five answers
    assert found.error == pytest.approx((0.05 + 0.7 + 0.95) / 5)
    assert math.isnan(found.accuracy[1])
    assert found.brier == pytest.approx((0.05**2 + 0.05**2 + 0.15**2 + 0.85**2 + 1) / 5)
    assert found.edges.tolist() == pytest.approx([i / 10 for i in range(11)])
    assert [line.split()[-1] for line in str(found).splitlines()[1:-1]] == ["1", "2", "2"]


def test_calibration_is_drawn_where_there_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measures.calibration([0.05, 0.95, 0.85, 0.85, 1.0], [0, 1, 1, 0, 0])
    (axes,) = found.plot().figure.axes
    points = axes.collections[0].get_offsets()
    np.testing.assert_allclose(points, [[0.05, 0], [0.85, 0.5], [0.975, 0.5]])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match="need matplotlib"):
        found.plot()


@pytest.mark.parametrize(
    ("accuracy", "lowest"),
    [(1.0, 0.9), (0.8, 0.6), (0.75, 0.2), (0.7, 0.1)],
)
def test_a_threshold_keeps_what_is_right_often_enough(accuracy: float, lowest: float) -> None:
    confidences = [0.1, 0.9, 0.8, 0.6, 0.6, 0.9, 0.5, 0.4, 0.3, 0.2]
    is_correct = [0, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    assert measures.threshold(confidences, is_correct, accuracy=accuracy) == lowest
    kept = [hit for sure, hit in zip(confidences, is_correct, strict=True) if sure >= lowest]
    assert sum(kept) / len(kept) >= accuracy


def test_no_threshold_is_none() -> None:
    assert measures.threshold([0.9, 0.8], [0, 1], accuracy=0.9) is None
    assert measures.threshold([0.8, 0.8], [0, 1], accuracy=0.9) is None  # equal values are accepted together


def test_importance_ratios_and_how_many_samples_they_are_worth() -> None:
    ratios = measures.importance_ratios([-1.0, -2.0], [-1.0, -2.0])
    assert ratios.tolist() == [1, 1]
    assert measures.effective_sample_size(ratios) == 2
    assert measures.effective_sample_size([3.0, 0.0, 0.0]) == 1
    assert measures.effective_sample_size([]) == 0


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        (lambda: measures.renyi_entropy(HALVES, -1), "order"),
        (lambda: measures.top_p_size(HALVES, 0), "mass"),
        (lambda: measures.calibration([], []), "confidences"),
        (lambda: measures.calibration([1.5], [1]), "confidences"),
        (lambda: measures.calibration([0.5], [1, 0]), "is_correct"),
        (lambda: measures.calibration([0.5], [2]), "is_correct"),
        (lambda: measures.calibration([0.5], [math.nan]), "is_correct"),
        (lambda: measures.threshold([0.5], [-1], accuracy=0.5), "is_correct"),
        (lambda: measures.calibration([0.5], [1], num_bins=0), "num_bins"),
        (lambda: measures.threshold([0.5], [1], accuracy=0.0), "accuracy"),
        (lambda: measures.threshold([-0.5], [1], accuracy=0.5), "confidences"),
    ],
)
def test_a_bad_argument_is_refused_by_name(call: object, parameter: str) -> None:
    assert callable(call)
    with pytest.raises(ParameterError) as caught:
        call()
    assert caught.value.parameter == parameter


@given(LOGITS, LOGITS)
def test_total_variation_is_half_the_sum_of_differences(logits: np.ndarray, others: np.ndarray) -> None:
    rows, them = softmax(logits), softmax(others)
    apart = measures.total_variation(rows, them)
    for row in range(3):
        gained = sum(max(math.exp(a) - math.exp(b), 0) for a, b in zip(rows[row], them[row], strict=True))
        assert apart[row] == pytest.approx(gained, abs=1e-12)
    assert measures.total_variation(ONE, np.roll(ONE, 1)) == 1


@given(LOGITS, LOGITS, st.integers(0, 7))
def test_lumped_rows_have_a_mass_of_one_and_are_no_further_apart(
    logits: np.ndarray, others: np.ndarray, k: int
) -> None:
    rows, them = softmax(logits), softmax(others)
    mine, theirs = measures.lumped(rows[:, :k]), measures.lumped(them[:, :k])
    assert np.exp(mine).sum(axis=1) == pytest.approx(1)
    assert (measures.kl_divergence(mine, theirs) <= measures.kl_divergence(rows, them) + 1e-9).all()
    assert (measures.total_variation(mine, theirs) <= measures.total_variation(rows, them) + 1e-9).all()
