"""Regular rows read out of their packed form: many as arrays, one as Python values.

Before it: `TopRows`. After it: JSON, Arrow and files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from logprobe.records.store.columns import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TopColumns:
    """A run of n rows, unpacked."""

    top_ids: Array  # (n, k) uint16, int32 or int64
    top_logprobs: Array  # (n, k) float32, nats, descending as given
    places: Array  # (n,) int64: index of the chosen token among the k best; k where it is outside
    chosen_ids: Array  # (n,)
    chosen_logprobs: Array  # (n,) float32, nats
    chosen_ranks: Array  # (n,) int64

    def joined(self) -> tuple[Array, Array, Array]:
        """Ids and logprobs (n, k + 1), column 0 the chosen token, and its ranks (n,)."""
        ids = np.concatenate([self.chosen_ids[:, None], self.top_ids], axis=1)
        logprobs = np.concatenate([self.chosen_logprobs[:, None], self.top_logprobs], axis=1)
        return ids, logprobs, self.chosen_ranks

    def flattened(self, *, repeats_chosen: bool) -> tuple[Array, Array, Array]:
        """Ids, logprobs and ranks (N,), row by row: the chosen token, then the k best by rank."""
        n, k = self.top_ids.shape
        ids, logprobs, _ = self.joined()
        others = np.broadcast_to(np.arange(1, k + 1), (n, k))
        ranks = np.concatenate([self.chosen_ranks[:, None], others], axis=1)
        if repeats_chosen:
            return ids.ravel(), logprobs.ravel(), ranks.ravel()
        is_shown = np.arange(k + 1) != (self.places + 1)[:, None]
        return ids[is_shown], logprobs[is_shown], ranks[is_shown]


class TopLists(NamedTuple):
    """One row, unpacked."""

    top_ids: list[int]
    top_logprobs: list[float]  # nats
    place: int  # index of the chosen token among the k best; k where it is outside
    chosen_id: int
    chosen_logprob: float
    chosen_rank: int
