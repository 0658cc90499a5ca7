"""Fit confidences to labeled answers, by temperature or isotonic fits; form label sets with a given coverage.

Plan of `calibrate`: a seeded shuffle splits the answers in three. The first half fits the probabilities, a
quarter sets the threshold of the label sets (split conformal prediction, Vovk et al. 2005), and the last
quarter measures the coverage, and the calibration error and Brier score before and after the fit.
scikit-learn (extra `eval`) fits isotonic curves; everything else needs only NumPy.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from logprobe.analysis import measures
from logprobe.analysis.classification import Classification, Confidence
from logprobe.analysis.io.files import read_limited, writing
from logprobe.errors import InputError, MissingPackageError, ParameterError, require
from logprobe.records.forms.versions import Versioned, check_version
from logprobe.text.prompts import as_list

if TYPE_CHECKING:
    from collections.abc import Iterable

Floats: TypeAlias = npt.NDArray[np.float64]
Method: TypeAlias = Literal["temperature", "isotonic"]

VERSION: Final = 1
METHODS: Final = ("temperature", "isotonic")
MIN_ANSWERS: Final = 20
MAX_FILE_BYTES: Final = 16 << 20
MIN_LOGPROB: Final = -700.0  # nats; replaces -inf, which has no temperature
TEMPERATURES: Final = (0.01, 100.0)
BISECTIONS: Final = 60
ROUNDING: Final = 1e-9  # bounds rounding errors of a coverage: 1 - 0.9 is slightly less than 0.1
ANSWERS: Final = ("right", "wrong")
"""Labels of answers that are given as confidences."""

Answer: TypeAlias = Classification | float
"""Probabilities of labels, or the confidence in one answer, in [0, 1]."""


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A nondecreasing map from a label's probability to its fitted probability, linear between points."""

    x: tuple[float, ...]
    y: tuple[float, ...]


class FitReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measures on held-out answers, which were used neither for the fit nor for the threshold."""

    num_fitted: int
    num_threshold: int
    num_held_out: int
    error_before: float  # expected calibration error of the most probable label
    error_after: float
    brier_before: float  # mean of (confidence - correct)², of the most probable label
    brier_after: float
    coverage: float  # fraction of label sets that have the true label
    mean_set_size: float

    def __str__(self) -> str:
        return (
            f"{self.num_held_out} held-out answers: calibration error {self.error_before:.3f} -> "
            f"{self.error_after:.3f}, Brier score {self.brier_before:.3f} -> {self.brier_after:.3f}, "
            f"coverage {self.coverage:.3f} with {self.mean_set_size:.2f} labels per set"
        )


class FittedConfidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fit by `calibrate`, which can be saved as JSON and applied to further answers of the same task."""

    version: int
    labels: tuple[str, ...]
    method: Method
    coverage: float  # requested probability that `label_set` has the true label
    threshold: float  # fitted probability from which a label is in `label_set`
    temperature: float | None = None
    curves: tuple[Curve, ...] = ()  # by label, with the method "isotonic"
    report: FitReport

    def apply(self, answer: Answer) -> Confidence:
        """Return the fitted probabilities of an answer.

        Raises:
            ParameterError: the answer has other labels than the fit, or is neither a `Classification` nor a
                number in [0, 1].
        """
        labels, logprobs = _read_answer(answer, "answer")
        self.check_labels(labels)
        [shares] = self._shares(logprobs[None])
        label_set = tuple(name for name, share in zip(labels, shares, strict=True) if share >= self.threshold)
        return Confidence(labels, shares, label_set)

    def check_labels(self, labels: tuple[str, ...]) -> None:
        """Raise `ParameterError` if the labels or their order differ from the fit's."""
        fitted = f"was fitted for the labels {[*self.labels]}, got {[*labels]}"
        require(labels == self.labels, "confidence", f"{fitted}; give the same labels in the same order")

    def _shares(self, logprobs: Floats) -> Floats:
        """Return fitted probabilities, (N, L)."""
        if self.temperature is not None:
            return _softmax(logprobs / self.temperature)
        before = _softmax(logprobs)
        columns = [np.interp(before[:, label], curve.x, curve.y) for label, curve in enumerate(self.curves)]
        values = np.stack(columns, axis=1)
        totals = values.sum(axis=1, keepdims=True)
        return np.where(totals > 0, values / np.where(totals > 0, totals, 1), before)

    def save(self, path: str | Path) -> None:
        """Write the fit to a JSON file.

        Raises:
            OutputError: the file cannot be written.
        """
        with writing(path):
            Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> FittedConfidence:
        """Read a file that `save` wrote.

        Raises:
            InputError: the file cannot be read, is not a fit, or has another version.
        """
        data = read_limited(path, MAX_FILE_BYTES, "use a file that save() wrote")
        try:
            check_version(msgspec.json.decode(data, type=Versioned).version, VERSION, path)
            fit = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{path}: is not a saved fit of `calibrate`: {error}") from error
        if not fit._is_valid():  # noqa: SLF001 - own class
            raise InputError(
                f"{path}: is not a saved fit of `calibrate`: its values are inconsistent; save the fit again"
            )
        return fit

    def _is_valid(self) -> bool:
        is_temperature = self.method == "temperature"
        if is_temperature != (self.temperature is not None) or is_temperature == bool(self.curves):
            return False
        if self.temperature is not None and not (self.temperature > 0 and math.isfinite(self.temperature)):
            return False
        has_curves = all(
            len(curve.x) == len(curve.y) > 0
            and all(a < b for a, b in zip(curve.x, curve.x[1:], strict=False))
            and all(0 <= value <= 1 for value in (*curve.x, *curve.y))
            for curve in self.curves
        )
        has_labels = len({*self.labels}) == len(self.labels) > 1
        is_set = 0 <= self.threshold <= 1 and 0 < self.coverage < 1
        return has_curves and has_labels and is_set and len(self.curves) in {0, len(self.labels)}


def calibrate(
    outputs: Iterable[Answer],
    labels: Iterable[str | bool],
    *,
    method: Method = "temperature",
    coverage: float = 0.9,
    seed: int = 0,
) -> FittedConfidence:
    """Fit a correction of label probabilities, or of confidences, to answers with known true labels.

    Args:
        outputs: results of `LLM.classify`, all with the same labels; or confidences in [0, 1] of any answers,
            such as `Field.probability`, which are fitted as the labels `right` and `wrong`.
        labels: the true label of each output; for confidences, whether the answer is right.
        method: `temperature` divides the log-probabilities by one number (Guo et al. 2017); `isotonic` fits a
            nondecreasing curve for each label and normalizes (Zadrozny and Elkan 2002), which needs more
            answers, about a thousand.
        coverage: probability that the label set of a further answer contains that answer's true label, if the
            answer and the labeled ones are exchangeable.
        seed: seed of the shuffle before the answers are split (fit, threshold, held out).

    Raises:
        MissingPackageError: scikit-learn is not installed, which `isotonic` needs.
        ParameterError: there are fewer than 20 outputs or too few for the coverage (0.9 needs 35), the
            outputs have different labels, a label is unknown, or all true labels in the half used for the fit
            are equal (the half depends on `seed`).

    Example:
        ```python
        fit = calibrate(llm.classify(prompts, [" yes", " no"]), truths)
        fit.save("reviews.json")
        ```
    """
    require(method in METHODS, "method", f"must be one of {', '.join(METHODS)}, got {method!r}")
    is_share = isinstance(coverage, float | np.floating) and 0 < coverage < 1
    require(is_share, "coverage", "must be a number between 0 and 1", got=coverage)
    outputs = as_list(outputs, "outputs", "must be an iterable of results of classify, or of confidences")
    labels = as_list(labels, "labels", "must be an iterable with the true label of each output")
    require(len(outputs) == len(labels), "labels", f"has {len(labels)} for {len(outputs)} outputs")
    is_enough = len(outputs) >= MIN_ANSWERS
    require(is_enough, "outputs", f"has {len(outputs)} answers; give at least {MIN_ANSWERS}")
    read = [_read_answer(output, "outputs") for output in outputs]
    names = read[0][0]
    is_one_task = all(own == names for own, _ in read)
    require(is_one_task, "outputs", "have different labels; fit each task separately")
    require(len(names) > 1, "outputs", "have one label; there is nothing to fit")
    truth = np.array([_index(label, names) for label in labels])
    logprobs = np.stack([own for _, own in read])
    order = np.random.default_rng(seed).permutation(len(truth))
    first, second = len(order) // 2, 3 * len(order) // 4
    fitted, threshold, held = order[:first], order[first:second], order[second:]
    is_varied = len(np.unique(truth[fitted])) > 1
    problem = "are all equal in the half of the answers used for the fit; give more answers"
    require(is_varied, "labels", problem)
    temperature: float | None = None
    curves: tuple[Curve, ...] = ()
    if method == "temperature":
        temperature = _temperature(logprobs[fitted], truth[fitted])
    else:
        curves = _curves(_softmax(logprobs[fitted]), truth[fitted])
    empty = FitReport(**dict.fromkeys(FitReport.__struct_fields__, 0))
    fit = FittedConfidence(
        version=VERSION,
        labels=names,
        method=method,
        coverage=coverage,
        threshold=0.0,
        temperature=temperature,
        curves=curves,
        report=empty,
    )
    after = fit._shares(logprobs)  # noqa: SLF001 - own class
    limit = _threshold(after[threshold, truth[threshold]], coverage)
    report = _report(_softmax(logprobs[held]), after[held], truth[held], limit)
    report = msgspec.structs.replace(report, num_fitted=len(fitted), num_threshold=len(threshold))
    return msgspec.structs.replace(fit, threshold=limit, report=report)


def _read_answer(answer: Answer, name: str) -> tuple[tuple[str, ...], Floats]:
    """Return labels and their log-probabilities, (L,) nats, which are finite and need not be normalized."""
    if isinstance(answer, Classification):
        logprobs = np.asarray(answer.corrected, np.float64)
        is_finite = not (np.isnan(logprobs) | np.isposinf(logprobs)).any()
        require(is_finite, name, "must have log-probabilities that are finite or -inf; leave the others out")
        return answer.labels, np.maximum(logprobs, MIN_LOGPROB)
    is_share = isinstance(answer, float | int | np.floating) and 0 <= answer <= 1
    require(is_share, name, "must be results of classify, or confidences in [0, 1]", got=answer)
    with np.errstate(divide="ignore"):
        logprobs = np.array([np.log(answer), np.log1p(-answer)])
    return ANSWERS, np.maximum(logprobs, MIN_LOGPROB)


def _index(label: str | bool, names: tuple[str, ...]) -> int:
    if isinstance(label, bool | np.bool_) and names == ANSWERS:
        return 0 if label else 1
    if label not in names:
        raise ParameterError("labels", f"{label!r:.60} is not one of the outputs' labels {[*names]}")
    return names.index(label)


def _softmax(logprobs: Floats) -> Floats:
    shares = np.exp(logprobs - logprobs.max(axis=1, keepdims=True))
    normalized: Floats = shares / shares.sum(axis=1, keepdims=True)
    return normalized


def _temperature(logprobs: Floats, truth: npt.NDArray[Any]) -> float:
    """Return the temperature of the highest likelihood, within `TEMPERATURES`.

    Let x be `logprobs` and b the inverse temperature. The derivative of the loss with respect to b is the
    mean of E[x] - x_true, where E is the expectation at b. It grows with b, so bisection finds its zero.
    """
    rows = logprobs - logprobs.max(axis=1, keepdims=True)
    right = rows[np.arange(len(truth)), truth]
    low, high = (math.log(1 / temperature) for temperature in TEMPERATURES[::-1])
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        expected = (_softmax(rows * math.exp(middle)) * rows).sum(axis=1)
        low, high = (middle, high) if (expected - right).mean() < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def _curves(shares: Floats, truth: npt.NDArray[Any]) -> tuple[Curve, ...]:
    """Return the isotonic fit of each label against all others."""
    try:
        from sklearn.isotonic import IsotonicRegression
    except ImportError as error:
        raise MissingPackageError("isotonic needs scikit-learn; pip install 'logprobe[eval]'") from error

    curves = []
    for label in range(shares.shape[1]):
        fit = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(shares[:, label], truth == label)
        curves.append(Curve(tuple(fit.X_thresholds_.tolist()), tuple(fit.y_thresholds_.tolist())))
    return tuple(curves)


def _threshold(shares: Floats, coverage: float) -> float:
    """Return the lowest fitted probability at which a label is in a label set.

    Take the fitted probability of the true label of each of n + 1 exchangeable answers. The last answer's is
    below the k-th lowest of the n others with a probability of at most k / (n + 1).
    """
    num = len(shares) + 1
    k = num - math.ceil(num * coverage - ROUNDING)
    # A quarter of the answers, rounded up, sets the threshold.
    needed = 4 * (math.ceil(1 / (1 - coverage) - ROUNDING) - 1) - 1
    few = f"are too few for a coverage of {coverage}; give at least {needed}, or a lower coverage"
    require(k > 0, "outputs", few)
    return float(np.sort(shares)[k - 1])


def _report(before: Floats, after: Floats, truth: npt.NDArray[Any], threshold: float) -> FitReport:
    was, now = (
        measures.calibration(shares.max(axis=1).clip(0, 1), shares.argmax(axis=1) == truth)
        for shares in (before, after)
    )
    sets = after >= threshold
    return FitReport(
        num_fitted=0,
        num_threshold=0,
        num_held_out=len(truth),
        error_before=was.error,
        error_after=now.error,
        brier_before=was.brier,
        brier_after=now.brier,
        coverage=float(sets[np.arange(len(truth)), truth].mean()),
        mean_set_size=float(sets.sum(axis=1).mean()),
    )
