"""Fits of confidence beside brute force: likelihoods, pools of adjacent violators, and the sets' coverage."""

from __future__ import annotations

import json
import math
import re
import sys
from fractions import Fraction
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from logprobe.analysis import Classification, FittedConfidence, calibrate, confidence
from logprobe.analysis.confidence import FitReport, _threshold
from logprobe.errors import InputError, MissingPackageError, OutputError, ParameterError
from refusals import raises

if TYPE_CHECKING:
    from pathlib import Path

LABELS = ("yes", "no", "maybe")
TRUE_TEMPERATURE = 3.0
needs_sklearn = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")
each_method = pytest.mark.parametrize(
    "method", ["temperature", pytest.param("isotonic", marks=needs_sklearn)]
)


def answers(count: int, num_labels: int = 3, seed: int = 0) -> tuple[list[Classification], list[str]]:
    """Answers of an overconfident model: the truth is drawn at `TRUE_TEMPERATURE`."""
    random = np.random.default_rng(seed)
    logprobs = random.normal(size=(count, num_labels)) * 4
    logprobs -= np.logaddexp.reduce(logprobs, axis=1, keepdims=True) + 2  # not normalized
    flat = np.exp(logprobs / TRUE_TEMPERATURE)
    flat /= flat.sum(axis=1, keepdims=True)
    truth = [int(random.choice(num_labels, p=row)) for row in flat]
    labels = LABELS[:num_labels]
    return [Classification(labels, row, row) for row in logprobs], [labels[place] for place in truth]


def fitted_part(outputs: list[Classification], truth: list[str], seed: int = 0) -> tuple[Any, Any]:
    """The half of the answers that `calibrate` fits, as arrays."""
    order = np.random.default_rng(seed).permutation(len(truth))[: len(truth) // 2]
    places = np.array([LABELS.index(label) for label in truth])[order]
    return np.stack([output.logprobs for output in outputs])[order], places


@pytest.mark.parametrize("num_labels", [2, 3])
def test_the_temperature_has_the_highest_likelihood_of_a_grid(num_labels: int) -> None:
    outputs, truth = answers(800, num_labels)
    fit = calibrate(outputs, truth)
    logprobs, places = fitted_part(outputs, truth)

    def loss(temperature: float) -> float:
        scaled = logprobs / temperature
        scaled = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
        return -float(scaled[np.arange(len(places)), places].mean())

    grid = np.exp(np.linspace(np.log(0.3), np.log(30), 2001))
    best = grid[np.argmin([loss(one) for one in grid])]
    assert fit.temperature == pytest.approx(best, rel=0.01)
    assert fit.temperature == pytest.approx(TRUE_TEMPERATURE, rel=0.25)
    for output in outputs[:5]:
        want = np.exp(output.logprobs / fit.temperature)
        np.testing.assert_allclose(fit.apply(output).shares, want / want.sum(), rtol=1e-9)


def pool_adjacent_violators(x: Any, y: Any) -> Any:
    """Isotonic regression by its definition: merge neighbours while their means decrease."""
    order = np.lexsort((y, x))
    blocks: list[list[float]] = []
    for value in y[order]:
        blocks.append([float(value), 1.0])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, count = blocks.pop()
            total = blocks[-1][1] + count
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * count) / total, total]
    fitted = np.empty(len(x))
    fitted[order] = np.concatenate([np.full(int(count), mean) for mean, count in blocks])
    return fitted


def test_isotonic_curves_are_those_of_pooled_neighbours() -> None:
    pytest.importorskip("sklearn")
    outputs, truth = answers(400)
    fit = calibrate(outputs, truth, method="isotonic")
    logprobs, places = fitted_part(outputs, truth)
    shares = np.exp(logprobs - np.logaddexp.reduce(logprobs, axis=1, keepdims=True))
    for place, curve in enumerate(fit.curves):
        want = pool_adjacent_violators(shares[:, place], (places == place).astype(float))
        np.testing.assert_allclose(np.interp(shares[:, place], curve.x, curve.y), want, atol=1e-9)
    assert all(abs(fit.apply(output).shares.sum() - 1) < 1e-9 for output in outputs)


@each_method
def test_a_fit_lowers_error_and_brier_score_on_further_answers(method: Any) -> None:
    outputs, truth = answers(3000)
    fit = calibrate(outputs, truth, method=method)
    further, their_truth = answers(3000, seed=1)
    before = np.mean(
        [
            (max(one.probabilities.values()) - (one.label == right)) ** 2
            for one, right in zip(further, their_truth, strict=True)
        ]
    )
    found = [fit.apply(one) for one in further]
    after = np.mean(
        [(one.probability - (one.label == right)) ** 2 for one, right in zip(found, their_truth, strict=True)]
    )
    assert after < before - 0.03
    assert fit.report.error_after < fit.report.error_before / 2
    assert fit.report.brier_after == pytest.approx(after, abs=0.03)
    assert fit.report.brier_before == pytest.approx(before, abs=0.03)


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_label_sets_have_their_coverage(coverage: float) -> None:
    hits = []
    for seed in range(150):  # small samples, where an off-by-one of the threshold shows
        outputs, truth = answers(41, seed=seed)
        fit = calibrate(outputs[:40], truth[:40], coverage=coverage, seed=seed)
        hits.append(truth[40] in fit.apply(outputs[40]).label_set)
    error = np.sqrt(coverage * (1 - coverage) / len(hits))
    assert coverage - 3 * error < np.mean(hits) < coverage + 1 / 11 + 3 * error


@pytest.mark.parametrize("coverage", ["0.5", "0.8", "0.9", "0.95", "0.99"])
def test_the_threshold_is_that_of_exact_arithmetic(coverage: str) -> None:
    """In floating point 1 - 0.9 is less than 0.1, which gave too low thresholds for 9 and 19 answers."""
    for num in range(1, 201):
        shares = np.random.default_rng(num).permutation(num) / num
        k = math.floor((num + 1) * (1 - Fraction(coverage)))
        if k:
            assert _threshold(shares, float(coverage)) == (k - 1) / num
        else:
            with raises(ParameterError, parameter="outputs"):
                _threshold(shares, float(coverage))


@pytest.mark.parametrize(("coverage", "least"), [(0.9, 35), (0.95, 75), (0.8, 20)])
def test_the_least_number_of_answers_for_a_coverage_is_named(coverage: float, least: int) -> None:
    outputs, truth = answers(least)
    assert calibrate(outputs, truth, coverage=coverage).threshold > 0
    if least > 20:
        few = least - 1
        with raises(ParameterError, parameter="outputs", match=f"at least {least}, or a lower coverage"):
            calibrate(outputs[:few], truth[:few], coverage=coverage)


def test_confidences_of_any_answers_are_fitted() -> None:
    pytest.importorskip("sklearn")
    random = np.random.default_rng(0)
    confidences = random.uniform(0.5, 1, 2000)
    is_right = random.uniform(size=2000) < confidences**4  # overconfident
    fit = calibrate([*confidences, 1.0, 0.0], [*is_right, True, False], method="isotonic")
    assert fit.apply(0.8).probabilities["right"] == pytest.approx(0.8**4, abs=0.1)
    assert fit.report.error_after < 0.06 < fit.report.error_before


@each_method
def test_a_saved_fit_gives_the_same_numbers(tmp_path: Path, method: Any) -> None:
    outputs, truth = answers(100)
    fit = calibrate(outputs, truth, method=method)
    fit.save(tmp_path / "fit.json")
    same = FittedConfidence.load(tmp_path / "fit.json")
    assert same == fit
    assert [same.apply(one).shares.tolist() for one in outputs] == [
        fit.apply(one).shares.tolist() for one in outputs
    ]


def stored(**changes: Any) -> dict[str, Any]:
    report = dict.fromkeys(FitReport.__struct_fields__, 0)
    fit = {"version": 1, "labels": ["a", "b"], "method": "temperature", "coverage": 0.9, "threshold": 0.2}
    return fit | {"temperature": 2.0, "report": report} | changes


CURVE = {"x": [0.1, 0.9], "y": [0.2, 0.7]}


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    fit = msgspec.convert(stored(), FittedConfidence)
    for path in (tmp_path, tmp_path / "missing" / "fit.json"):
        with pytest.raises(InputError, match=re.escape(str(path))):
            FittedConfidence.load(path)
        with pytest.raises(OutputError, match=re.escape(str(path))):
            fit.save(path)


def test_no_more_than_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = msgspec.convert(stored(), FittedConfidence)
    fit.save(tmp_path / "fit.json")
    size = (tmp_path / "fit.json").stat().st_size
    monkeypatch.setattr(confidence, "MAX_FILE_BYTES", size)
    assert FittedConfidence.load(tmp_path / "fit.json") == fit
    monkeypatch.setattr(confidence, "MAX_FILE_BYTES", size - 1)
    for path in (tmp_path / "fit.json", "/dev/zero"):
        with pytest.raises(InputError, match="more than"):
            FittedConfidence.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"temperature": 0.0},
        {"temperature": None},
        {"method": "platt"},
        {"labels": ["a"]},
        {"curves": [CURVE, CURVE]},
        {"method": "isotonic", "temperature": None, "curves": [CURVE]},
        {"method": "isotonic", "temperature": None, "curves": [CURVE, {"x": [0.9, 0.1], "y": [0, 1]}]},
        {"method": "isotonic", "temperature": None, "curves": [CURVE, {"x": [0.1], "y": [2]}]},
        {"method": "isotonic", "temperature": None, "curves": [CURVE, {"x": [0.1, 3], "y": [0, 1]}]},
        {"threshold": 5},
        {"threshold": -0.1},
        {"coverage": 0},
        {"coverage": 1},
        {"labels": ["a", "a"]},
        {"more": 1},
    ],
)
def test_files_that_are_no_fits_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(stored()))
    assert FittedConfidence.load(path).temperature == 2.0
    path.write_text(json.dumps(stored(**changes)))
    with pytest.raises(InputError):
        FittedConfidence.load(path)


def scored(logprob: float) -> Classification:
    """An answer with one such log-probability."""
    logprobs = np.array([-1.0, logprob, -1.0])
    return Classification(LABELS, logprobs, logprobs)


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"method": "platt"}, "method"),
        ({"coverage": 1.0}, "coverage"),
        ({"labels": ["yes"] * 9}, "labels"),
        ({"labels": ["yes"] * 40}, "labels"),
        ({"labels": ["what"] * 40}, "labels"),
        ({"outputs": [], "labels": []}, "outputs"),
        ({"outputs": [0.5] * 39 + [1.5]}, "outputs"),
        ({"outputs": [0.5] * 39 + ["x"]}, "outputs"),
        ({"outputs": [scored(math.inf)] * 40}, "outputs"),
        ({"outputs": [scored(math.nan)] * 40}, "outputs"),
    ],
)
def test_invalid_arguments_are_named(change: dict[str, Any], parameter: str) -> None:
    outputs, truth = answers(40)
    with raises(ParameterError, parameter=parameter):
        calibrate(**{"outputs": outputs, "labels": truth} | change)


def test_other_labels_are_refused() -> None:
    outputs, _ = answers(1)
    own = msgspec.convert(stored(), FittedConfidence)
    with raises(ParameterError, parameter="confidence"):
        own.apply(outputs[0])


@pytest.mark.parametrize("answer", [scored(math.inf), scored(math.nan), 1.5, "x"])
def test_an_answer_without_probabilities_is_refused(answer: Any) -> None:
    own = msgspec.convert(stored(labels=[*LABELS]), FittedConfidence)
    with raises(ParameterError, parameter="answer"):
        own.apply(answer)


@each_method
def test_a_label_that_is_never_true_is_fitted(method: Any) -> None:
    outputs, truth = answers(200)
    truth = ["yes" if label == "maybe" else label for label in truth]
    assert calibrate(outputs, truth, method=method).apply(outputs[0]).shares.sum() == pytest.approx(1)


def test_impossible_labels_are_fitted() -> None:
    outputs, truth = answers(60)
    lone = np.array([0.0, -np.inf, -np.inf])
    fit = calibrate([*outputs, Classification(LABELS, lone, lone)], [*truth, "yes"])
    assert fit.apply(Classification(LABELS, lone, lone)).probability == pytest.approx(1)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.isotonic", None)
    outputs, truth = answers(40)
    with pytest.raises(MissingPackageError, match=r"logprobe\[eval\]"):
        calibrate(outputs, truth, method="isotonic")
    assert calibrate(outputs, truth).temperature is not None


def test_the_temperature_is_that_of_scikit_learn() -> None:
    pytest.importorskip("sklearn")
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator

    class Given(ClassifierMixin, BaseEstimator):
        classes_ = np.arange(3)

        def fit(self, _: Any, __: Any) -> Any:
            return self

        def predict(self, rows: Any) -> Any:
            return rows.argmax(axis=1)

        def decision_function(self, rows: Any) -> Any:
            return rows

        def __sklearn_is_fitted__(self) -> bool:
            return True

    outputs, truth = answers(800)
    model = CalibratedClassifierCV(FrozenEstimator(Given()), method="temperature", ensemble=False)
    model.fit(*fitted_part(outputs, truth))
    fit = calibrate(outputs, truth)
    want = model.predict_proba(np.stack([output.logprobs for output in outputs]))
    np.testing.assert_allclose([fit.apply(output).shares for output in outputs], want, atol=1e-3)
