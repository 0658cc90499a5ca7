"""Rows of one width, as an engine step produces them: chosen token, its rank, and k most likely."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.store.columns import check_not_infinite, check_not_negative
from logprobe.records.store.entries import Entries

if TYPE_CHECKING:
    import numpy.typing as npt

    from logprobe.records.store.columns import Array


class Steps(NamedTuple):
    """Fixed-width rows with k + 1 entries and the chosen token's rank.

    A chosen token that is also among the k most likely is stored twice. Readers see it once, unless
    `repeats_chosen` is set: then the caller's own columns contained it twice.
    """

    token_ids: Array  # (n, k + 1) integers >= 0, column 0 the chosen token
    logprobs: Array  # (n, k + 1) float32 or float64, nats
    ranks: Array  # (n,) integers >= 0, of the chosen token
    repeats_chosen: bool = False
    texts: list[str | None] | None = None  # n * (k + 1) texts given with the entries; None if there are none

    @classmethod
    def of(cls, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, ranks: npt.ArrayLike) -> Steps:
        """Validate the arrays of an engine step.

        Raises:
            ParameterError: the shapes do not match, ids or ranks are negative or not integers, or a
                log-probability is +inf.
        """
        rows = cls(np.asarray(token_ids), np.asarray(logprobs), np.asarray(ranks))
        shape = rows.token_ids.shape
        if len(shape) != 2 or shape[1] == 0 or rows.logprobs.shape != shape or rows.ranks.shape != shape[:1]:
            raise ParameterError(
                "token_ids",
                f"has shape {shape}, logprobs {rows.logprobs.shape} and ranks {rows.ranks.shape}; "
                "give shapes (n, k + 1), (n, k + 1) and (n,)",
            )
        for name, values in (("token_ids", rows.token_ids), ("ranks", rows.ranks)):
            if values.dtype.kind not in "iu" and values.size:
                raise ParameterError(name, f"must be integers, got {values.dtype}")
        check_not_negative(token_ids=rows.token_ids, ranks=rows.ranks)
        check_not_infinite(rows.logprobs)
        return rows

    def take(self, rows: Array) -> Steps:
        """Select rows by their indices."""
        width, texts = self.token_ids.shape[1], self.texts
        return Steps(
            self.token_ids[rows],
            self.logprobs[rows],
            self.ranks[rows],
            self.repeats_chosen,
            texts and [text for row in rows.tolist() for text in texts[row * width : (row + 1) * width]],
        )

    def is_shown(self) -> Array:
        """Return an (n, k + 1) bool array that is True for the entries that readers see."""
        is_shown = np.ones(self.token_ids.shape, np.bool_)
        if not self.repeats_chosen:
            np.not_equal(self.token_ids[:, 1:], self.token_ids[:, :1], out=is_shown[:, 1:])
        return is_shown

    def entries(self) -> Entries:
        """Return the entries that readers see."""
        n, width = self.token_ids.shape
        is_shown = self.is_shown()
        offsets = np.zeros(n + 1, np.int64)
        np.cumsum(np.count_nonzero(is_shown, axis=1), out=offsets[1:])
        ranks = np.broadcast_to(np.arange(width, dtype=np.int64), (n, width)).copy()
        ranks[:, 0] = self.ranks
        return Entries(
            offsets=offsets,
            token_ids=self.token_ids[is_shown],
            logprobs=self.logprobs[is_shown],
            ranks=ranks[is_shown],
            texts=self.texts and [*compress(self.texts, is_shown.ravel().tolist())],
        )

    def chosen_entries(self) -> Entries:
        """Return the chosen token of each row."""
        return Entries(  # copies, so that a caller's writes do not change the record
            offsets=np.arange(len(self.ranks) + 1),
            token_ids=self.token_ids[:, 0].copy(),
            logprobs=self.logprobs[:, 0].copy(),
            ranks=self.ranks.copy(),
        )

    def top_entries(self) -> Entries:
        """Return the k most likely tokens of each row, by rank."""
        n, k = len(self.ranks), self.token_ids.shape[1] - 1
        return Entries(
            offsets=np.arange(n + 1) * k,
            token_ids=self.token_ids[:, 1:].flatten(),
            logprobs=self.logprobs[:, 1:].flatten(),
            ranks=np.tile(np.arange(1, k + 1), n),
        )
