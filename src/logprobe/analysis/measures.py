"""Metrics computed from log-probabilities: pure functions of arrays.

Values are in nats unless a name says bits. An impossible token is -inf, and so is every sum that includes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from logprobe.errors import require

if TYPE_CHECKING:
    import numpy.typing as npt

    from logprobe.records.forms.picture import Picture

Floats: TypeAlias = "npt.NDArray[np.float64]"
LARGEST_EXPONENT = 700.0  # exp of a larger number overflows float64
MIN_REST = 1e-12  # a probability; far below the rounding error of float32 logprobs

# -- metrics of the chosen tokens ----------------------------------------------------------------------------


def total(logprobs: npt.ArrayLike) -> float:
    """Sum the log-probabilities in float64; the sum is -inf if a token is impossible."""
    return float(np.sum(np.asarray(logprobs, np.float64)))


def per_unit(logprob: float, num_units: int) -> float | None:
    """Return the log-probability per unit (token, byte, character or word), or None if `num_units` is 0."""
    return logprob / num_units if num_units else None


def pmi(logprob: float, unconditional_logprob: float) -> float:
    """Return the pointwise mutual information of a context and its continuation, in nats.

    The result is NaN if both log-probabilities of the continuation are -inf.
    """
    with np.errstate(invalid="ignore"):
        return float(np.float64(logprob) - np.float64(unconditional_logprob))


def is_greedy(ranks: npt.ArrayLike) -> bool:
    """Return True if every token has rank 1: no other token was more likely at its position."""
    return bool(np.all(np.asarray(ranks) == 1))


def perplexity(logprob: float, num_units: int) -> float | None:
    """Return the exponential of the mean surprisal per token, word or byte, or None if `num_units` is 0."""
    mean = per_unit(logprob, num_units)
    if mean is None:
        return None
    return math.exp(-mean) if -mean < LARGEST_EXPONENT else math.inf


def bits_per_byte(logprob: float, num_bytes: int) -> float | None:
    """Return the mean surprisal per byte, in bits, or None if `num_bytes` is 0."""
    mean = per_unit(logprob, num_bytes)
    return None if mean is None else in_bits(-mean)


def in_bits(nats: float) -> float:
    """Convert nats to bits."""
    return nats / math.log(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """Statistics of the chosen tokens' ranks."""

    mean: float
    median: float
    mean_reciprocal: float  # mean of 1 / rank
    top_1: float  # share of tokens with rank 1
    top_5: float
    top_10: float


def rank_stats(ranks: npt.ArrayLike) -> RankStats | None:
    """Compute statistics of 1-based ranks, or return None if `ranks` is empty."""
    values = np.asarray(ranks, np.float64)
    if not len(values):
        return None
    shares = [float(np.mean(values <= limit)) for limit in (1, 5, 10)]
    return RankStats(
        mean=float(values.mean()),
        median=float(np.median(values)),
        mean_reciprocal=float(np.mean(1 / values)),
        top_1=shares[0],
        top_5=shares[1],
        top_10=shares[2],
    )


# -- metrics of whole distributions: rows are log-probabilities (..., V), results are (...) ------------------


def entropy(rows: npt.ArrayLike) -> Floats:
    """Return the Shannon entropy of each row, in nats."""
    logprobs = np.asarray(rows, np.float64)
    return -_mean_under(np.exp(logprobs), logprobs)


def varentropy(rows: npt.ArrayLike) -> Floats:
    """Return the variance of the surprisal under each row's own distribution, in nats squared."""
    logprobs = np.asarray(rows, np.float64)
    weights = np.exp(logprobs)
    mean = _mean_under(weights, logprobs)
    apart = np.where(weights > 0, logprobs - mean[..., None], 0.0)
    return np.asarray(np.sum(weights * apart**2, axis=-1))


def renyi_entropy(rows: npt.ArrayLike, order: float) -> Floats:
    """Return the Rényi entropy of each row, in nats.

    Order 0 gives the log of the number of possible tokens, order 1 the Shannon entropy, and order inf the
    min-entropy.

    Raises:
        ParameterError: `order` is negative.
    """
    require(order >= 0, "order", f"must be 0 or more (inf is allowed), got {order}")
    logprobs = np.asarray(rows, np.float64)
    if order == 1:
        return entropy(logprobs)
    if math.isinf(order):
        return np.asarray(-np.max(logprobs, axis=-1))
    if order == 0:
        return np.asarray(np.log(np.sum(np.isfinite(logprobs), axis=-1)))
    return logsumexp(order * logprobs) / (1 - order)


def self_certainty(rows: npt.ArrayLike) -> Floats:
    """Return KL(uniform ‖ row) for each row, in nats: the self-certainty of Kang et al. 2025."""
    logprobs = np.asarray(rows, np.float64)
    return np.asarray(-np.mean(logprobs, axis=-1) - np.log(logprobs.shape[-1]))


def top_p_size(rows: npt.ArrayLike, mass: float) -> npt.NDArray[np.int64]:
    """Return how many of the most likely tokens are needed to reach a total probability of `mass`.

    Raises:
        ParameterError: `mass` is outside (0, 1].
    """
    require(0 < mass <= 1, "mass", f"must be in (0, 1], got {mass}")
    logprobs = np.asarray(rows, np.float64)
    held = np.cumsum(-np.sort(-np.exp(logprobs), axis=-1), axis=-1)
    size = 1 + np.sum(held < mass * (1 - 1e-12), axis=-1)
    return np.asarray(np.minimum(size, np.sum(np.isfinite(logprobs), axis=-1)), np.int64)


def ranks(rows: npt.ArrayLike, token_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return the rank of one token per row: 1 + the number of strictly more likely tokens."""
    logprobs = np.asarray(rows, np.float64)
    chosen = np.take_along_axis(logprobs, np.asarray(token_ids)[..., None], axis=-1)
    return np.asarray(1 + np.sum(logprobs > chosen, axis=-1), np.int64)


def kl_divergence(rows: npt.ArrayLike, others: npt.ArrayLike) -> Floats:
    """Return KL(row ‖ other) for each pair of rows, in nats: the cost of using `others` instead of `rows`."""
    logprobs, other = np.asarray(rows, np.float64), np.asarray(others, np.float64)
    weights = np.exp(logprobs)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sum(np.where(weights > 0, weights * (logprobs - other), 0.0), axis=-1))


def total_variation(rows: npt.ArrayLike, others: npt.ArrayLike) -> Floats:
    """Return the total variation distance, in [0, 1], between each row and the corresponding other row."""
    probabilities = np.exp(np.asarray(rows, np.float64)), np.exp(np.asarray(others, np.float64))
    return np.asarray(np.sum(np.abs(probabilities[0] - probabilities[1]), axis=-1) / 2)


def lumped(logprobs: npt.ArrayLike) -> Floats:
    """Append to each row the log of the total probability of all tokens that are missing from the row.

    The KL divergence or total variation between two lumped rows is a lower bound on its value for the whole
    rows. The appended probability is at least `MIN_REST`, because a zero that is only a rounding error would
    make the KL divergence infinite.

    Args:
        logprobs: (..., K) log-probabilities of K tokens of the vocabulary, in nats.

    Returns:
        (..., K + 1) log-probabilities, in nats.
    """
    given = np.asarray(logprobs, np.float64)
    rest = np.log(np.maximum(1 - np.exp(given).sum(axis=-1, keepdims=True), MIN_REST))
    return np.concatenate([given, rest], axis=-1)


def acceptance(rows: npt.ArrayLike, others: npt.ArrayLike) -> Floats:
    """Return Σ min(p, q) for each row p and the corresponding row q of `others`.

    This is the acceptance rate of speculative sampling (Leviathan et al. 2023).
    """
    smaller = np.minimum(np.asarray(rows, np.float64), np.asarray(others, np.float64))
    return np.asarray(np.exp(smaller).sum(axis=-1))


def log_mass(rows: npt.ArrayLike, is_member: npt.ArrayLike) -> Floats:
    """Return the log of the total probability of the tokens in `is_member`, (V,) bool, for each row."""
    return logsumexp(np.asarray(rows, np.float64)[..., np.asarray(is_member, np.bool_)])


# -- metrics of answers --------------------------------------------------------------------------------------


def choice_probabilities(logprobs: npt.ArrayLike) -> Floats:
    """Return the probability of each choice: the softmax of the choices' log-probabilities, (C,)."""
    values = np.asarray(logprobs, np.float64)
    return np.asarray(np.exp(values - logsumexp(values)))


def mean_and_error(values: npt.ArrayLike) -> tuple[float, float | None]:
    """Return the mean and its standard error (sample deviation / √n; None with fewer than two values)."""
    numbers = np.asarray(values, np.float64)
    if len(numbers) < 2:
        return float(numbers.mean()), None
    return float(numbers.mean()), float(numbers.std(ddof=1) / math.sqrt(len(numbers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Mean confidence and accuracy in bins of equal width; both are NaN in a bin without answers."""

    error: float  # expected calibration error: mean |confidence - accuracy|, weighted by count
    brier: float  # mean of (confidence - correct)²: 0 is best; a constant confidence of 0.5 gives 0.25
    edges: Floats  # (num_bins + 1,)
    counts: npt.NDArray[np.int64]  # (num_bins,)
    confidence: Floats  # (num_bins,), mean within the bin
    accuracy: Floats  # (num_bins,), mean within the bin

    def __str__(self) -> str:
        lines = [
            f"{low:.2f} - {high:.2f}  {sure:6.3f}  {right:6.3f}  {count:7d}"
            for low, high, sure, right, count in zip(
                self.edges, self.edges[1:], self.confidence, self.accuracy, self.counts, strict=False
            )
            if count
        ]
        figures = f"calibration error {self.error:.3f}, Brier score {self.brier:.3f}"
        return "\n".join([f"{'bin':11}  {'sure':>6}  {'right':>6}  answers", *lines, figures])

    def plot(self) -> Picture:
        """Plot accuracy against confidence; requires the extra `plot`.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        from logprobe.records.forms.picture import drawn_bins

        return drawn_bins(self.counts, self.confidence, self.accuracy)


def calibration(confidences: npt.ArrayLike, is_correct: npt.ArrayLike, *, num_bins: int = 10) -> Calibration:
    """Compute the expected calibration error (Naeini et al. 2015; Guo et al. 2017) and the Brier score.

    Raises:
        ParameterError: no answers, confidences outside [0, 1], correctness other than 0 and 1, different
            lengths, or no bins.
    """
    require(num_bins >= 1, "num_bins", f"must be at least 1, got {num_bins}")
    values, hits = _answers(confidences, is_correct)
    bins = np.minimum((values * num_bins).astype(np.int64), num_bins - 1)
    counts = np.bincount(bins, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(bins, values, num_bins) / counts
        accuracy = np.bincount(bins, hits, num_bins) / counts
    gaps = np.where(counts > 0, np.abs(confidence - accuracy), 0.0)
    return Calibration(
        error=float(np.sum(gaps * counts) / len(values)),
        brier=float(np.mean((values - hits) ** 2)),
        edges=np.linspace(0, 1, num_bins + 1),
        counts=counts,
        confidence=confidence,
        accuracy=accuracy,
    )


def group_means(values: npt.ArrayLike, window: int) -> Floats:
    """Return the moving averages of T values over `window` values, (max(T - window, 0) + 1,).

    If T < window, the only average is over all T values.
    """
    numbers = np.asarray(values, np.float64)
    size = min(window, len(numbers))
    sums = np.concatenate([np.zeros(1), np.cumsum(numbers)])
    return np.asarray((sums[size:] - sums[: len(sums) - size]) / size)


def threshold(confidences: npt.ArrayLike, is_correct: npt.ArrayLike, *, accuracy: float) -> float | None:
    """Return the lowest confidence c such that the answers with confidence >= c reach `accuracy`, or None.

    Answers with equal confidence are either all counted or all left out. With few answers, c may not
    generalize.

    Raises:
        ParameterError: no answers, confidences outside [0, 1], correctness other than 0 and 1, different
            lengths, or an invalid `accuracy`.
    """
    require(0 < accuracy <= 1, "accuracy", f"must be in (0, 1], got {accuracy}")
    values, hits = _answers(confidences, is_correct)
    order = np.argsort(-values)
    values, hits = values[order], hits[order]
    is_last = np.append(np.diff(values) != 0, True)
    rates = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    good = np.flatnonzero(is_last & (rates >= accuracy))
    return float(values[good[-1]]) if len(good) else None


def _answers(confidences: npt.ArrayLike, is_correct: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Validate confidences and correctness, and return both as float64 arrays (correctness as 0 or 1)."""
    values, hits = np.asarray(confidences, np.float64), np.asarray(is_correct, np.float64)
    require(values.ndim == 1 and len(values) > 0, "confidences", "must be a non-empty list of numbers")
    require(
        values.shape == hits.shape,
        "is_correct",
        f"has shape {hits.shape}, but confidences has {values.shape}; give one per confidence",
    )
    require(bool(np.all((values >= 0) & (values <= 1))), "confidences", "must be in [0, 1]")
    require(bool(np.all((hits == 0) | (hits == 1))), "is_correct", "must be True or False, or 1 or 0")
    return values, hits


# -- metrics that indicate memorized or machine-generated texts ----------------------------------------------


DETECTIONS: Final = ("min_k", "min_k_plus", "fast_detect_gpt", "zlib_ratio")
"""Names of the functions below that need only one model."""


def min_k(logprobs: npt.ArrayLike, *, share: float = 0.2) -> float | None:
    """Return Min-K% Prob, the mean logprob of the least likely tokens, in nats; None without tokens.

    The formula is 1/|E| · Σ log p(x_t | x_<t) over t in E, where E holds the max(⌊share · T⌋, 1) tokens with
    the lowest logprob. A higher value suggests that the model was trained on the text (Shi et al. 2024,
    https://arxiv.org/abs/2310.16789).

    Raises:
        ParameterError: `share` is outside (0, 1].
    """
    return _mean_of_least(np.asarray(logprobs, np.float64), share)


def min_k_plus(
    logprobs: npt.ArrayLike, entropies: npt.ArrayLike, varentropies: npt.ArrayLike, *, share: float = 0.2
) -> float | None:
    """Return Min-K%++, the mean of the lowest (log p(x_t | x_<t) - m_t) / s_t; None without tokens.

    `share` is the fraction of tokens to average. m_t and s_t are the mean and the standard deviation of
    log p(z | x_<t) with z sampled from p(· | x_<t): minus the entropy, and the square root of the varentropy.
    If s_t is 0, a token whose logprob is m_t counts as 0. A higher value suggests that the model was trained
    on the text (Zhang et al. 2024, https://arxiv.org/abs/2404.02936).

    Raises:
        ParameterError: `share` is outside (0, 1].
    """
    apart = np.asarray(logprobs, np.float64) + np.asarray(entropies, np.float64)
    return _mean_of_least(_standardised(apart, np.asarray(varentropies, np.float64)), share)


def fast_detect_gpt(
    logprobs: npt.ArrayLike, entropies: npt.ArrayLike, varentropies: npt.ArrayLike
) -> float | None:
    """Return Fast-DetectGPT's conditional probability curvature, computed analytically; None without tokens.

    The formula is Σ (log p(x_t | x_<t) - m_t) / √ Σ s_t², with m_t and s_t as in `min_k_plus`; one model is
    both the sampling and the scoring model. A higher value suggests machine-generated text (Bao et al. 2024,
    https://arxiv.org/abs/2310.05130).
    """
    apart = np.asarray(logprobs, np.float64) + np.asarray(entropies, np.float64)
    if not len(apart):
        return None
    return float(_standardised(np.sum(apart), np.sum(np.asarray(varentropies, np.float64))))


def zlib_ratio(logprobs: npt.ArrayLike, num_compressed: int) -> float | None:
    """Return the mean logprob per token divided by the zlib-compressed size in bytes; None without tokens.

    This is -(log perplexity) / zlib entropy. A higher value (nearer to 0) suggests that the model was trained
    on the text (Carlini et al. 2021, https://arxiv.org/abs/2012.07805). Carlini et al.'s code computes the
    inverse; the form here is the one in Zhang et al.
    """
    values = np.asarray(logprobs, np.float64)
    return float(values.mean() / num_compressed) if len(values) else None


def cross_entropy(rows: npt.ArrayLike, others: npt.ArrayLike) -> Floats:
    """Return the cross-entropy -Σ p log q, in nats, for each row p and the corresponding other row q."""
    return -_mean_under(np.exp(np.asarray(rows, np.float64)), np.asarray(others, np.float64))


def binoculars(logprobs: npt.ArrayLike, cross_entropies: npt.ArrayLike) -> float | None:
    """Return the Binoculars score: log perplexity / log cross-perplexity of two models; None without tokens.

    The formula is mean of -log q(x_t | x_<t) / mean of -Σ_v p(v | x_<t) log q(v | x_<t), where p is the
    observer (a base model) and q the performer (the observer's instruct version). A lower value suggests
    machine-generated text (Hans et al. 2024, https://arxiv.org/abs/2401.12070). The paper puts the observer's
    perplexity in the numerator. This function uses the performer's, like the authors' code (see its issue
    27), because the published thresholds are for the code. `analysis.binoculars` scores texts with both
    models.
    """
    values, crossed = np.asarray(logprobs, np.float64), np.asarray(cross_entropies, np.float64)
    if not (len(values) and len(crossed)):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(-values.mean() / crossed.mean())


def roc_auc(values: npt.ArrayLike, labels: npt.ArrayLike) -> float | None:
    """Return the area under the ROC curve, or None if all labels are equal.

    This is the probability that a value with a true label exceeds one with a false label, where a tie counts
    as half. It is computed from rank sums (Mann & Whitney 1947) and equals scikit-learn's `roc_auc_score`.

    Raises:
        ParameterError: different lengths, or a value is NaN.
    """
    numbers, hits = np.asarray(values, np.float64), np.asarray(labels, np.bool_)
    require(
        numbers.shape == hits.shape,
        "labels",
        f"has shape {hits.shape}, but values has {numbers.shape}; give one per value",
    )
    require(not np.isnan(numbers).any(), "values", "must not be NaN; leave out items without a value")
    num_hits = int(hits.sum())
    num_others = len(hits) - num_hits
    if not (num_hits and num_others):
        return None
    _, place, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2  # mean rank of equal values, 1-based
    above = float(middle[place][hits].sum()) - num_hits * (num_hits + 1) / 2
    return above / (num_hits * num_others)


def _mean_of_least(values: Floats, share: float) -> float | None:
    require(0 < share <= 1, "share", f"must be in (0, 1], got {share}")
    if not len(values):
        return None
    num = max(int(len(values) * share), 1)
    return float(np.mean(np.partition(values, num - 1)[:num]))


def _standardised(apart: npt.ArrayLike, variances: npt.ArrayLike) -> Floats:
    """Return apart / √variances, with 0 / 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.equal(apart, 0), 0.0, np.asarray(apart) / np.sqrt(np.asarray(variances)))


# -- metrics of two models' logprobs of the same tokens ------------------------------------------------------


def importance_ratios(logprobs: npt.ArrayLike, others: npt.ArrayLike) -> Floats:
    """Return each token's ratio p / q from its logprobs under the target (p) and the sampler (q).

    A ratio is NaN if both logprobs are -inf.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.exp(np.asarray(logprobs, np.float64) - np.asarray(others, np.float64)))


def effective_sample_size(ratios: npt.ArrayLike) -> float:
    """Return Kish's effective sample size (Σ w)² / Σ w² of importance weights; 0 if all are 0."""
    weights = np.asarray(ratios, np.float64)
    squares = float(np.sum(weights**2))
    return float(np.sum(weights)) ** 2 / squares if squares else 0.0


def _mean_under(weights: Floats, values: Floats) -> Floats:
    """Return Σ w v over the last axis, with 0 · -inf = 0."""
    return np.asarray(
        np.sum(np.where(weights > 0, weights * np.where(weights > 0, values, 0.0), 0.0), axis=-1)
    )


def logsumexp(values: npt.ArrayLike) -> Floats:
    """Return log Σ exp over the last axis, in float64; -inf if the axis is empty."""
    logs = np.asarray(values, np.float64)
    if not logs.shape[-1]:
        return np.full(logs.shape[:-1], -np.inf)
    best = np.max(logs, axis=-1, keepdims=True)
    shift = np.where(np.isfinite(best), best, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.sum(np.exp(logs - shift), axis=-1)) + shift[..., 0])
