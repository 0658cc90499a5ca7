"""What an ask may give beside a bare row: a prefix to extend, the likeliest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from logprobe.engine.slots import IntArray
    from logprobe.next_token.row_cache import Row


@dataclass(frozen=True, slots=True, eq=False)
class KnownPrefix:
    """A prefix, the adapter it was read under (None: the base model), and its next-token distribution."""

    token_ids: IntArray  # (num_tokens,) int32
    lora: str | None
    logprobs: Row  # (V,) float32, nats, read-only


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The likeliest next tokens."""

    token_ids: IntArray  # (k,) int32, by descending log-probability
    logprobs: NDArray[np.float32]  # (k,) nats, descending


def top_tokens(row: Row, k: int) -> TopTokens:
    """The `k` largest of a row, descending, ties by ascending id."""
    # Everything as large as the k-th largest, since a tie may stand on either side of the cut.
    threshold = np.partition(row, len(row) - k)[len(row) - k]
    candidates = np.flatnonzero(row >= threshold)
    ids = candidates[np.argsort(-row[candidates], kind="stable")][:k].astype(np.int32)
    return TopTokens(ids, row[ids])
