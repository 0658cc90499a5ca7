"""Probabilities of labels after a prompt, and fitted probabilities of the same labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from logprobe.records.values import EqualByValue

if TYPE_CHECKING:
    from logprobe.text.boundary import Boundary

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Confidence(EqualByValue):
    """Fitted probabilities of the labels of one answer."""

    labels: tuple[str, ...]
    shares: Floats  # (L,) fitted probabilities, which sum to 1
    label_set: tuple[str, ...]  # includes the true label with at least the fit's coverage; may be empty

    @property
    def label(self) -> str:
        """The label with the highest fitted probability; in a tie, the first."""
        return self.labels[int(self.shares.argmax())]

    @property
    def probability(self) -> float:
        """Fitted probability of `label`."""
        return float(self.shares.max())

    @property
    def probabilities(self) -> dict[str, float]:
        """Fitted probability by label."""
        return dict(zip(self.labels, self.shares.tolist(), strict=True))

    def __repr__(self) -> str:
        return f"<Confidence: {self.label!r} {self.probability:.3f}, set {list(self.label_set)}>"


@dataclass(frozen=True, slots=True, eq=False)
class Classification(EqualByValue):
    """Probabilities of L labels after one prompt."""

    labels: tuple[str, ...]
    logprobs: Floats  # (L,) nats, log P(any of the label's texts | prompt), without correction
    corrected: Floats  # (L,) nats, `logprobs` after the correction, if any
    boundary: Boundary = "token"  # "bytes" if a token spans the end of the prompt and the start of a label
    confidence: Confidence | None = None  # fitted probabilities, if a fit was given

    @property
    def probabilities(self) -> dict[str, float]:
        """Softmax of `corrected`, by label; NaN if no label is possible."""
        with np.errstate(invalid="ignore"):
            shares = np.exp(self.corrected - np.logaddexp.reduce(self.corrected))
        return dict(zip(self.labels, shares.tolist(), strict=True))

    @property
    def label(self) -> str:
        """The most probable label; in a tie, the first of the labels."""
        return self.labels[int(self.corrected.argmax())]

    @property
    def mass(self) -> float:
        """Total probability of all labels; 1 - `mass` is the probability of any other answer."""
        return float(np.exp(np.logaddexp.reduce(self.logprobs)))

    @property
    def margin(self) -> float:
        """Difference in nats between the best and the second-best label.

        Infinity with a single label, and NaN if both labels are impossible.
        """
        ordered = np.sort(self.corrected)
        with np.errstate(invalid="ignore"):
            return float(ordered[-1] - ordered[-2]) if len(ordered) > 1 else float("inf")

    def __repr__(self) -> str:
        shares = ", ".join(f"{label!r}: {share:.3f}" for label, share in self.probabilities.items())
        return f"<Classification: {{{shares}}}, mass {self.mass:.3f}>"
