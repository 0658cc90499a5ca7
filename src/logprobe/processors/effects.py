"""Effect of a processor on one position, reported to requests with `explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


class ProcessorEffect(msgspec.Struct, frozen=True):
    """The effect of one processor on one position.

    `changes` maps each returned candidate whose logit changed to the difference in nats: -inf if it was
    masked, +inf if it was unmasked. `mass_moved` is the total variation distance between the distributions
    before and after, in [0, 1]: half the sum of all absolute changes in probability.
    """

    processor: str
    changes: dict[int, float]
    mass_moved: float


class RowEffect(msgspec.Struct):
    """A row of logits before and after one processor, (V,) float32 each, on the host."""

    processor: str
    before: NDArray[np.float32]
    after: NDArray[np.float32]

    def among(self, token_ids: Iterable[int]) -> ProcessorEffect:
        """Return the effect, with `changes` for these candidates; ids may repeat, in any order."""
        ids = np.array(sorted(set(token_ids)), np.int64)
        ids = ids[self.before[ids] != self.after[ids]]
        changes = zip(ids.tolist(), (self.after[ids] - self.before[ids]).tolist(), strict=True)
        moved = _softmax(self.before) - _softmax(self.after)
        return ProcessorEffect(self.processor, dict(changes), float(np.abs(moved).sum() / 2))


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # of a row without a possible token
        weights: NDArray[np.float64] = np.exp(logits.astype(np.float64) - logits.max())
        weights /= weights.sum()
        return weights
