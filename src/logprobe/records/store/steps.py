"""Rows of one width, as an engine step produces them: chosen token, its rank, and k most likely."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.store.columns import check_not_negative, float_column, logs_of_rest, narrow_copy
from logprobe.records.store.entries import Entries, RowLists, TopLists

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from logprobe.records.store.columns import Array


class Steps(NamedTuple):
    """Fixed-width rows with k + 1 entries and the chosen token's rank.

    A chosen token that is also among the k most likely is stored twice. Readers see it once, unless
    `repeats_chosen` is set, which means that the caller's columns contained the token twice.
    """

    token_ids: Array  # (n, k + 1) integers >= 0, column 0 the chosen token
    logprobs: Array  # (n, k + 1) float32, nats; float64 only before the rows are added to a record
    ranks: Array  # (n,) integers >= 0, of the chosen token
    repeats_chosen: bool = False

    @classmethod
    def of(cls, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, ranks: npt.ArrayLike) -> Steps:
        """Validate the arrays of an engine step; logprobs become float32 if that is exact.

        Raises:
            ParameterError: the shapes do not match, ids or ranks are negative or not integers, or a
                log-probability is +inf.
        """
        rows = cls(np.asarray(token_ids), np.asarray(logprobs), np.asarray(ranks))
        shape = rows.token_ids.shape
        if len(shape) != 2 or shape[1] == 0 or rows.logprobs.shape != shape or rows.ranks.shape != shape[:1]:
            raise ParameterError(
                "token_ids",
                f"token_ids {shape}, logprobs {rows.logprobs.shape} and ranks {rows.ranks.shape} "
                "must be (n, k + 1), (n, k + 1) and (n,)",
            )
        for name, values in (("token_ids", rows.token_ids), ("ranks", rows.ranks)):
            if values.dtype.kind not in "iu" and values.size:
                raise ParameterError(name, f"must be integers, got {values.dtype}")
        check_not_negative(token_ids=rows.token_ids, ranks=rows.ranks)
        return rows._replace(logprobs=float_column(rows.logprobs))

    @classmethod
    def joined(cls, runs: Sequence[Steps]) -> Steps:
        """Concatenate `Steps` of the same `kind`."""
        return cls(
            np.concatenate([run.token_ids for run in runs]),
            np.concatenate([run.logprobs for run in runs]),
            np.concatenate([run.ranks for run in runs]),
            runs[0].repeats_chosen,
        )

    @property
    def kind(self) -> tuple[int, bool]:
        """Key for merging: adjacent blocks with equal keys can be merged."""
        return self.width, self.repeats_chosen

    @property
    def width(self) -> int:
        """Number of stored entries per row, k + 1."""
        return int(self.token_ids.shape[1])

    @property
    def num_rows(self) -> int:
        """Number of positions."""
        return len(self.ranks)

    @property
    def num_entries(self) -> int:
        """Number of entries that readers see."""
        return int(self.widths().sum())

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return int(self.token_ids.nbytes + self.logprobs.nbytes + self.ranks.nbytes)

    def packed(self) -> Steps:
        """Return a copy whose arrays have the narrowest types that hold their values; -0.0 becomes 0.0."""
        logprobs = np.ascontiguousarray(self.logprobs + np.float32(0))
        return self._replace(
            token_ids=narrow_copy(self.token_ids), logprobs=logprobs, ranks=narrow_copy(self.ranks)
        )

    def cut(self, rows: slice | Array) -> Steps:
        """Select rows; the result of a slice shares memory."""
        return Steps(self.token_ids[rows], self.logprobs[rows], self.ranks[rows], self.repeats_chosen)

    def repeats(self) -> Array:
        """Return an (n, k) bool array that is True where one of the top k tokens is the chosen token."""
        is_repeat: Array = self.token_ids[:, 1:] == self.token_ids[:, :1]
        return is_repeat

    def widths(self) -> Array:
        """Return how many entries of each row readers see, (n,) int64."""
        widths = np.full(self.num_rows, self.width)
        return widths if self.repeats_chosen else widths - np.count_nonzero(self.repeats(), axis=1)

    def row(self, row: int) -> RowLists:
        """Return one row as Python values."""
        lists = self.token_ids[row].tolist(), self.logprobs[row].tolist()
        return row_lists(*lists, int(self.ranks[row]), repeats_chosen=self.repeats_chosen)

    def top_lists(self, row: int) -> TopLists:
        """Return the chosen token and the k most likely tokens of one row as Python values."""
        return top_lists(self.token_ids[row].tolist(), self.logprobs[row].tolist())

    def entries(self) -> Entries:
        """Return the entries that readers see."""
        n, width = self.token_ids.shape
        is_shown = np.ones((n, width), np.bool_)
        if not self.repeats_chosen:
            np.logical_not(self.repeats(), out=is_shown[:, 1:])
        offsets = np.zeros(n + 1, np.int64)
        np.cumsum(np.count_nonzero(is_shown, axis=1), out=offsets[1:])
        ranks = np.broadcast_to(np.arange(width, dtype=np.int64), (n, width)).copy()
        ranks[:, 0] = self.ranks
        return Entries(
            offsets=offsets,
            token_ids=self.token_ids[is_shown],
            logprobs=self.logprobs[is_shown],
            ranks=ranks[is_shown],
        )

    def chosen_entries(self) -> Entries:
        """Return the chosen token of each row."""
        return Entries(  # copies, so that a caller's writes do not change the record
            offsets=np.arange(self.num_rows + 1),
            token_ids=self.token_ids[:, 0].copy(),
            logprobs=self.logprobs[:, 0].copy(),
            ranks=self.ranks.copy(),
        )

    def top_entries(self) -> Entries:
        """Return the k most likely tokens of each row, by rank."""
        k = self.width - 1
        return Entries(
            offsets=np.arange(self.num_rows + 1) * k,
            token_ids=self.token_ids[:, 1:].flatten(),
            logprobs=self.logprobs[:, 1:].flatten(),
            ranks=np.tile(np.arange(1, k + 1), self.num_rows),
        )

    def other_logprobs(self) -> Array:
        """Return the log of the probability outside each row's entries, (n,) float32 in nats."""
        return logs_of_rest(np.column_stack([self.logprobs[:, 1:], self._alone()]))

    def outside_top_logprobs(self) -> Array:
        """Return the log of the probability outside each row's k most likely tokens, (n,) float32 in nats."""
        # If rounding gives the k tokens all of the probability, that of a chosen token outside them remains.
        return np.maximum(logs_of_rest(self.logprobs[:, 1:]), self._alone())

    def _alone(self) -> Array:
        """Return each chosen token's logprob, or -inf if it is among the k; (n,) float32 in nats."""
        alone: Array = np.where(self.repeats().any(axis=1), np.float32(-np.inf), self.logprobs[:, 0])
        return alone


def row_lists(ids: list[int], logprobs: list[float], rank: int, *, repeats_chosen: bool) -> RowLists:
    """Return one step row as readers see it."""
    ranks = [rank, *range(1, len(ids))]
    if not repeats_chosen:
        chosen_id = ids[0]
        while ids.count(chosen_id) > 1:
            place = ids.index(chosen_id, 1)
            del ids[place], logprobs[place], ranks[place]
    return RowLists(ids, logprobs, ranks)


def top_lists(ids: list[int], logprobs: list[float]) -> TopLists:
    """Return the chosen token and the k most likely tokens of one step row."""
    return TopLists(ids[0], logprobs[0], ids[1:], logprobs[1:])
