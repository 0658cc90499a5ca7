"""Histograms of durations with fixed buckets, as in Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
"""Inclusive upper bounds in seconds of all buckets except the last, which has no bound."""


@dataclass(slots=True)
class Durations:
    """Histogram of one kind of duration."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))  # per bucket
    seconds: float = 0.0  # sum of all durations

    def add(self, seconds: float) -> None:
        """Record one duration, in seconds."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.seconds += seconds

    def copy(self) -> Durations:
        """Return an independent copy."""
        return Durations(self.counts.copy(), self.seconds)

    def __add__(self, other: Durations) -> Durations:
        counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        return Durations(counts, self.seconds + other.seconds)
