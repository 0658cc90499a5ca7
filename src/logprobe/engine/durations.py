"""How long things take, counted as Prometheus counts it: so many of each length."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
"""The longest of each length but the last, s."""


@dataclass(slots=True)
class Durations:
    """Times of one kind; each adds to one count."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    seconds: float = 0.0  # their sum

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.seconds += seconds

    def copy(self) -> Durations:
        """These of now."""
        return Durations(self.counts.copy(), self.seconds)

    def __add__(self, other: Durations) -> Durations:
        counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        return Durations(counts, self.seconds + other.seconds)
