"""The figures of a whole data set, from its rows in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.analysis import measures
from logprobe.analysis.datasets.settings import HITS

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

NUM_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean and its standard error (None of fewer than two rows)."""

    mean: float
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a data set came to; None where it has no such figure."""

    num_rows: int  # scored
    num_bad: int  # in the side file, or told on standard error
    num_tokens: int | None = None
    num_bytes: int | None = None
    logprob: float | None = None  # sum of all rows, nats
    logprob_a_row: Mean | None = None
    perplexity: float | None = None  # by token, over all rows
    bits_per_byte: float | None = None
    acc: Mean | None = None  # by the sum
    acc_norm: Mean | None = None  # by the mean over characters, as lm-evaluation-harness
    acc_bytes: Mean | None = None  # by the mean over bytes
    calibration_error: float | None = None  # of the softmax over the sums, in 10 bins
    auc: dict[str, float | None] | None = None  # of each measure; None: all labels are equal


class Moments:
    """Mean and standard error of numbers that come in runs (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        """Take in a run."""
        if not len(values):
            return
        count, mean = len(values), float(values.mean())
        apart, total = mean - self.mean, self.count + count
        with np.errstate(invalid="ignore"):
            self._squares += float(((values - mean) ** 2).sum()) + apart**2 * self.count * count / total
        self.mean += apart * count / total
        self.count = total

    def result(self) -> Mean | None:
        """What they came to; None of nothing."""
        if not self.count:
            return None
        if self.count < 2:
            return Mean(mean=self.mean, error=None)
        return Mean(mean=self.mean, error=math.sqrt(self._squares / (self.count - 1) / self.count))


class Tally:
    """Adds up tables of rows; of labelled texts it keeps each measure, for their order."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._sums = dict.fromkeys(("logprob", "num_tokens", "num_bytes"), 0.0)
        self._moments = {name: Moments() for name in ("logprob", *HITS)}
        self._bins = np.zeros((3, NUM_BINS))  # how many, their confidence, their hits
        self._names: set[str] = set()
        self._labelled: dict[str, list[NDArray[np.float64]]] = {name: [] for name in LABELLED}

    def add(self, table: pa.Table) -> None:
        """Take in some rows."""
        self._num_rows += len(table)
        self._names |= set(table.column_names)
        columns = {name: _numbers(table, name) for name in table.column_names if name in _WANTED}
        for name in self._sums.keys() & columns.keys():
            self._sums[name] += float(columns[name].sum())
        for name in self._moments.keys() & columns.keys():
            self._moments[name].add(columns[name])
        if "label" in self._names and len(table):
            for name, values in self._labelled.items():
                values.append(_numbers(table, name))
        if {"confidence", "acc"} <= columns.keys() and len(table):
            bins = measures.calibration(columns["confidence"], columns["acc"], num_bins=NUM_BINS)
            weights = np.stack([bins.counts, bins.confidence * bins.counts, bins.accuracy * bins.counts])
            self._bins += np.nan_to_num(weights)

    def summary(self, num_bad: int) -> Summary:
        """What all of it came to."""
        figures: dict[str, Any] = {name: self._moments[name].result() for name in HITS}
        if "logprob" in self._names:
            tokens, num_bytes = int(self._sums["num_tokens"]), int(self._sums["num_bytes"])
            figures |= {
                "num_tokens": tokens,
                "num_bytes": num_bytes,
                "logprob": self._sums["logprob"],
                "logprob_a_row": self._moments["logprob"].result(),
                "perplexity": measures.perplexity(self._sums["logprob"], tokens),
                "bits_per_byte": measures.bits_per_byte(self._sums["logprob"], num_bytes),
            }
        if self._bins[0].sum():
            gaps = np.abs(self._bins[1] - self._bins[2]).sum()
            figures["calibration_error"] = float(gaps / self._bins[0].sum())
        if self._labelled["label"]:
            columns = {name: np.concatenate(values) for name, values in self._labelled.items()}
            labels = columns.pop("label")
            figures["auc"] = {
                name: measures.roc_auc(values[~np.isnan(values)], labels[~np.isnan(values)] == 1)
                for name, values in columns.items()
            }
        return Summary(num_rows=self._num_rows, num_bad=num_bad, **figures)


LABELLED = ("label", "logprob_per_token", *measures.DETECTIONS)
_WANTED = {"logprob", "num_tokens", "num_bytes", "confidence", *HITS}


def _numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    return np.asarray(table.column(name).to_numpy(), np.float64)
