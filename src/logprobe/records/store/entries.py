"""Positions with any number of entries as flat arrays, and single positions as Python values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, compress, pairwise, repeat
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from logprobe.records.store.columns import logs_of_rest, narrowed, narrowest_id_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.records.store.columns import Array
    from logprobe.records.values import TokenTable

NO_RANK = -1  # marks a missing rank in integer columns; readers get None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The N entries of n positions as flat arrays; each position's chosen token comes first."""

    offsets: Array  # (n + 1,) int64: position i owns entries [offsets[i], offsets[i + 1])
    token_ids: Array  # (N,) unsigned or signed integers
    logprobs: Array  # (N,) float32 or float64, nats
    ranks: Array  # (N,) integers; NO_RANK where missing
    is_none: Array | None = None  # (n,) bool: True for positions appended as None
    texts: list[str | None] | None = None  # N texts appended with the entries; None if there are none

    @classmethod
    def none(cls, count: int) -> Entries:
        """Create `count` positions without a prediction; they take no memory."""
        return cls(
            offsets=np.broadcast_to(np.int64(0), count + 1),
            token_ids=np.empty(0, np.uint16),
            logprobs=np.empty(0, np.float32),
            ranks=np.empty(0, np.int32),
            is_none=np.broadcast_to(np.True_, count),
        )

    @classmethod
    def joined(cls, runs: Sequence[Entries]) -> Entries:
        """Concatenate `Entries` that have no texts; a single one is returned as is."""
        if len(runs) == 1:
            return runs[0]
        if not runs:
            return cls.none(0)
        filled = [run for run in runs if len(run.token_ids)] or runs[:1]
        widths = np.concatenate([np.diff(run.offsets) for run in runs])
        return cls(
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)]),
            token_ids=np.concatenate([run.token_ids for run in filled]),
            logprobs=np.concatenate([run.logprobs for run in filled]),
            ranks=np.concatenate([run.ranks for run in filled]),
            is_none=np.concatenate([run.none_flags() for run in runs]),
        )

    @property
    def kind(self) -> None:
        """Key for merging adjacent blocks; always None, because any two blocks of entries can be merged."""
        return

    @property
    def num_rows(self) -> int:
        """Number of positions."""
        return len(self.offsets) - 1

    @property
    def num_entries(self) -> int:
        """Number of entries."""
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes, without `texts`."""
        columns = (self.offsets[1:], self.token_ids, self.logprobs, self.ranks, self.none_flags())
        return sum(int(column.nbytes) for column in columns)

    def none_flags(self) -> Array:
        """Return an (n,) bool array that is True where a position was appended as None."""
        return np.zeros(self.num_rows, np.bool_) if self.is_none is None else self.is_none

    def packed(self) -> Entries:
        """Return a copy without texts whose arrays have the narrowest types that hold their values."""
        largest_id, largest_rank = (int(column.max(initial=0)) for column in (self.token_ids, self.ranks))
        rank_type = np.int32 if largest_rank <= np.iinfo(np.int32).max else np.int64
        return Entries(
            offsets=self.offsets - self.offsets[0],
            token_ids=self.token_ids.astype(narrowest_id_dtype(largest_id)),
            logprobs=np.array(narrowed(self.logprobs)),
            ranks=self.ranks.astype(rank_type),
            is_none=None if self.is_none is None else self.is_none.copy(),
        )

    def cut(self, rows: slice | Array) -> Entries:
        """Select positions. A slice must have step 1, and the result then shares memory."""
        is_none, texts = None if self.is_none is None else self.is_none[rows], self.texts
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.num_rows)
            offsets = self.offsets[start : max(stop, start) + 1]
            picked: slice | Array = slice(int(offsets[0]), int(offsets[-1]))
            texts = texts and texts[int(offsets[0]) : int(offsets[-1])]
            offsets = offsets - offsets[0]
        else:
            offsets, picked = spans(self.offsets[rows], np.diff(self.offsets)[rows])
            texts = texts and [texts[entry] for entry in picked.tolist()]
        return Entries(
            offsets=offsets,
            token_ids=self.token_ids[picked],
            logprobs=self.logprobs[picked],
            ranks=self.ranks[picked],
            is_none=is_none,
            texts=texts,
        )

    def possible(self) -> Entries:
        """Return the entries whose log-probability is not -inf."""
        is_kept = ~np.isneginf(self.logprobs)
        num_kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_kept)])
        return Entries(
            offsets=num_kept[self.offsets],
            token_ids=self.token_ids[is_kept],
            logprobs=self.logprobs[is_kept],
            ranks=self.ranks[is_kept],
            is_none=self.is_none,
            texts=None if self.texts is None else [*compress(self.texts, is_kept)],
        )

    def is_valid(self) -> Array:
        """Return an (n,) bool array that is False where a position has a NaN log-probability."""
        is_valid = np.ones(self.num_rows, np.bool_)
        wrong = np.flatnonzero(np.isnan(self.logprobs))
        is_valid[np.searchsorted(self.offsets, wrong, side="right") - 1] = False
        return is_valid

    def rank_list(self) -> list[int | None]:
        """Return the ranks as a list, with None where missing."""
        ranks: list[int | None] = self.ranks.tolist()
        return [None if rank == NO_RANK else rank for rank in ranks] if NO_RANK in ranks else ranks

    def text_list(self, table: TokenTable | None) -> list[str | None]:
        """Return the texts as a list, with None where unknown."""
        return texts_of(self.token_ids.tolist(), self.texts, table)

    # -- methods shared with `Steps` --------------------------------------------------------------------

    def entries(self) -> Entries:
        """Return self, for the interface shared with `Steps`."""
        return self

    def row(self, row: int) -> RowLists | None:
        """Return one position as Python values; None if it has no prediction."""
        if self.is_none is not None and self.is_none[row]:
            return None
        entries = self.cut(slice(row, row + 1))
        return RowLists(entries.token_ids.tolist(), entries.logprobs.tolist(), entries.rank_list())

    def top_lists(self, row: int) -> TopLists | None:
        """Return the chosen token and the k most likely tokens of one position; None if it has no entries."""
        entries = self.cut(slice(row, row + 1))
        ids, logprobs = entries.token_ids.tolist(), entries.logprobs.tolist()
        if not ids:
            return None
        best = _top_of_row(ids, entries.ranks.tolist())
        return TopLists(
            ids[0], logprobs[0], [ids[entry] for entry in best], [logprobs[entry] for entry in best]
        )

    def chosen_entries(self) -> Entries:
        """Return the chosen token of each position that has entries."""
        return self._picked(lambda ids, _: [0] if ids else [])

    def top_entries(self) -> Entries:
        """Return the k most likely tokens of each position; the chosen token only if it is one of them."""
        return self._picked(_top_of_row)

    def _picked(self, pick: Callable[[list[int], list[int]], list[int]]) -> Entries:
        ids, ranks, bounds = self.token_ids.tolist(), self.ranks.tolist(), self.offsets.tolist()
        kept = [
            [first + entry for entry in pick(ids[first:last], ranks[first:last])]
            for first, last in pairwise(bounds)
        ]
        picked = np.array(list(chain.from_iterable(kept)), np.intp)
        return Entries(
            offsets=np.concatenate([[0], np.cumsum([len(row) for row in kept], dtype=np.int64)]),
            token_ids=self.token_ids[picked],
            logprobs=self.logprobs[picked],
            ranks=self.ranks[picked],
            is_none=self.is_none,
        )

    def other_logprobs(self) -> Array:
        """Return the log of the probability outside each position's entries, (n,) float32 in nats.

        NaN for positions without a prediction.
        """
        rest = np.full(self.num_rows, np.nan, np.float32)
        for row in np.flatnonzero(~self.none_flags()).tolist():
            first, last = self.offsets[row : row + 2]
            _, kept = np.unique(self.token_ids[first:last], return_index=True)
            rest[row] = logs_of_rest(self.logprobs[first:last][kept][None])[0]
        return rest

    def outside_top_logprobs(self) -> Array:
        """Return the log of the probability outside each position's top k, (n,) float32 in nats.

        NaN for positions without a prediction.
        """
        top, rest = self.top_entries(), np.full(self.num_rows, np.nan, np.float32)
        for row in np.flatnonzero(~self.none_flags()).tolist():
            (first, last), (best, end) = self.offsets[row : row + 2], top.offsets[row : row + 2]
            rest[row] = logs_of_rest(top.logprobs[best:end][None])[0]
            if first < last and self.token_ids[first] not in top.token_ids[best:end]:
                rest[row] = max(rest[row], self.logprobs[first])  # as in `Steps.outside_top_logprobs`
        return rest


def spans(starts: Array, widths: Array) -> tuple[Array, Array]:
    """Return the offsets (n + 1,) of n ranges that are packed together, and the indices that they cover."""
    offsets = np.zeros(len(widths) + 1, np.int64)
    np.cumsum(widths, out=offsets[1:])
    return offsets, np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], widths)


def _top_of_row(ids: list[int], ranks: list[int]) -> list[int]:
    """Return the indices of a row's k most likely tokens, by rank.

    They are all indices but the first, which is the chosen token's. The first is inserted if the other ranks
    have a gap, or end, at its rank.
    """
    rest = list(range(1, len(ids)))
    if not ids or ids[0] in ids[1:]:
        return rest
    gap = next((place for place, entry in enumerate(rest) if ranks[entry] != place + 1), len(rest))
    if gap == len(rest) and ranks[0] != gap + 1:
        return rest
    return [*rest[:gap], 0, *rest[gap:]]


def texts_of(
    token_ids: Sequence[int], texts: Sequence[str | None] | None, table: TokenTable | None
) -> list[str | None]:
    """Return the text of each entry: the text in `texts`, else the table's, else None."""
    given = list(texts or repeat(None, len(token_ids)))[: len(token_ids)]
    if table is None:
        return given
    read = table.token_text
    return [read(token_id) if text is None else text for token_id, text in zip(token_ids, given, strict=True)]


def with_holes(entries: Entries) -> Entries:
    """Expand at most one entry per position to exactly one, as arrays that are masked where missing."""
    is_hole = entries.offsets[1:] == entries.offsets[:-1]
    if not is_hole.any():
        return entries

    def spread(column: Array, filler: float) -> Array:
        values = np.full(len(is_hole), filler, column.dtype)
        values[~is_hole] = column
        masked: Array = np.ma.MaskedArray(values, is_hole)
        return masked

    return Entries(
        offsets=np.arange(len(is_hole) + 1),
        token_ids=spread(entries.token_ids, 0),
        logprobs=spread(entries.logprobs, np.nan),
        ranks=spread(entries.ranks, 0),
        is_none=entries.is_none,
    )


class RowLists(NamedTuple):
    """Entries of one position as Python values, the chosen token first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int | None] | list[int]
    texts: list[str | None] | None = None  # None if no text was appended with the entries


class TopLists(NamedTuple):
    """Chosen token and k most likely tokens of one position, as Python values."""

    chosen_id: int
    chosen_logprob: float  # nats
    top_ids: list[int]
    top_logprobs: list[float]  # nats

    def possible(self) -> TopLists:
        """Return a copy without the alternatives whose log-probability is -inf."""
        is_kept = [logprob != -inf for logprob in self.top_logprobs]
        return self._replace(
            top_ids=[*compress(self.top_ids, is_kept)], top_logprobs=[*compress(self.top_logprobs, is_kept)]
        )
