"""Means with standard errors, summary statistics, and llama.cpp's metrics for comparing two models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from logprobe.analysis.measures import effective_sample_size, mean_and_error
from logprobe.records.forms.finite import finite_fields

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

QUANTILES: Final = (0.5, 0.9, 0.99, 0.999)

KLD_QUANTILES: Final = (0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001)
CHANGE_QUANTILES: Final = (0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001)
PERCENT: Final = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean and its standard error, which is None for a single value."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: ArrayLike) -> Mean:
        """Return the mean of at least one value."""
        mean, error = mean_and_error(values)
        return cls(mean=mean, error=error)

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.error is None else f" ± {self.error:.4f}")


class Moments:
    """Accumulates the mean and standard error of values that are added in batches (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, values: Floats) -> None:
        """Add a batch of values."""
        if not len(values):
            return
        count, mean = len(values), float(values.mean())
        apart, total = mean - self.mean, self.count + count
        with np.errstate(invalid="ignore"):
            self._squares += float(((values - mean) ** 2).sum()) + apart**2 * self.count * count / total
        self.mean += apart * count / total
        self.count = total

    def result(self) -> Mean | None:
        """Return the mean of all values added so far, or None if there are none."""
        if not self.count:
            return None
        if self.count < 2:
            return Mean(mean=self.mean, error=None)
        return Mean(mean=self.mean, error=math.sqrt(self._squares / (self.count - 1) / self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean, maximum and quantiles of an array of values."""

    mean: float
    max: float
    quantiles: dict[float, float]

    @classmethod
    def of(cls, values: Floats) -> Spread:
        """Compute the summary of at least one value."""
        with np.errstate(invalid="ignore"):  # infinite values
            values_at = np.quantile(values, QUANTILES)
        return cls(
            mean=float(values.mean()),
            max=float(values.max()),
            quantiles=dict(zip(QUANTILES, values_at.tolist(), strict=True)),
        )

    def to_dict(self) -> dict[str, float | None]:
        """Return the mean, the maximum and the percentiles ("p50", ...) by name, with ±9999 for infinity."""
        percentiles = {f"p{100 * share:g}": value for share, value in self.quantiles.items()}
        return finite_fields({"mean": self.mean, "max": self.max, **percentiles})


@np.errstate(invalid="ignore")
def effective_share(logs: Floats) -> float:
    """Return Kish's effective sample size divided by the number of samples, from the logs of the weights.

    The result is NaN if a weight is infinite.
    """
    # Subtract the maximum, because the weight of a long text may overflow.
    return effective_sample_size(np.exp(logs - logs.max())) / len(logs)


# -- llama.cpp's metrics -------------------------------------------------------------------------------------
# The metrics that `llama-perplexity --kl-divergence` prints, with the same names and units. Q is the model
# under test and base the reference. Standard errors assume independent positions. The formulas are the ones
# in llama.cpp's `tools/perplexity/perplexity.cpp`, which writes them as sums.


class Figure(NamedTuple):
    """A metric with its standard error (if known) and its unit ("%" or None)."""

    value: float
    error: float | None = None
    unit: str | None = None


def figures(base: Floats, other: Floats, kl: Floats, is_same_best: NDArray[np.bool_]) -> dict[str, Figure]:
    """Return all metrics by name, computed from T >= 1 positions.

    Args:
        base: (T,) logprobs of the text's tokens under the reference, in nats.
        other: (T,) logprobs of the same tokens under the model under test, in nats.
        kl: (T,) KL divergences, in nats.
        is_same_best: (T,) True if both models have the same most likely token.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return (
            _of_perplexities(-base, -other)
            | _of_divergences(kl)
            | _of_changes(np.exp(other) - np.exp(base))
            | {"Same top p": _share(is_same_best)}
        )


def _of_perplexities(base: Floats, other: Floats) -> dict[str, Figure]:
    """Compute the metrics of perplexity from surprisals; errors of exponentials use the delta method."""
    q, p, ratio = _mean(other), _mean(base), _mean(other - base)
    figures = {"Mean PPL(Q)": _exponential(q), "Mean PPL(base)": _exponential(p)}
    if len(base) > 1:
        correlation = float(np.corrcoef(base, other)[0, 1]) if base.std() and other.std() else math.nan
        figures["Cor(ln(PPL(Q)), ln(PPL(base)))"] = Figure(PERCENT * correlation, None, "%")
    figures["Mean ln(PPL(Q)/PPL(base))"] = ratio
    figures["Mean PPL(Q)/PPL(base)"] = _exponential(ratio)
    # By the delta method, a difference of exponentials has the same error as this linear combination.
    apart = _mean(np.exp(q.value) * other - np.exp(p.value) * base)
    figures["Mean PPL(Q)-PPL(base)"] = Figure(float(np.exp(q.value) - np.exp(p.value)), apart.error)
    return figures


def _of_divergences(kl: Floats) -> dict[str, Figure]:
    quantiles = np.quantile(kl, KLD_QUANTILES).tolist()
    named = {
        _name(share, "KLD"): Figure(value) for share, value in zip(KLD_QUANTILES, quantiles, strict=True)
    }
    ends = {"Maximum KLD": Figure(float(kl.max())), **named, "Minimum KLD": Figure(float(kl.min()))}
    return {"Mean KLD": _mean(kl)} | ends


def _of_changes(changes: Floats) -> dict[str, Figure]:
    """Compute the metrics of the changes in the text tokens' probabilities."""
    percent = PERCENT * changes
    quantiles = np.quantile(percent, CHANGE_QUANTILES).tolist()
    named = {
        _name(share, "Δp"): Figure(value, None, "%")
        for share, value in zip(CHANGE_QUANTILES, quantiles, strict=True)
    }
    squares = _mean(percent**2)
    rms = math.sqrt(squares.value)
    error = None if squares.error is None else squares.error / (2 * rms) if rms else 0.0
    return {
        "Mean Δp": _mean(percent)._replace(unit="%"),
        "Maximum Δp": Figure(float(percent.max()), None, "%"),
        **named,
        "Minimum Δp": Figure(float(percent.min()), None, "%"),
        "RMS Δp": Figure(rms, error, "%"),
    }


def _name(share: float, what: str) -> str:
    return f"Median {what}" if share == 0.5 else f"{PERCENT * share:.1f}% {what}"


def _mean(values: Floats) -> Figure:
    return Figure(*mean_and_error(values))


def _exponential(figure: Figure) -> Figure:
    value = float(np.exp(figure.value))
    return Figure(value, None if figure.error is None else value * figure.error)


def _share(is_so: NDArray[np.bool_]) -> Figure:
    share = float(is_so.mean())
    error = math.sqrt(share * (1 - share) / (len(is_so) - 1)) if len(is_so) > 1 else None
    return Figure(PERCENT * share, None if error is None else PERCENT * error, "%")
