"""Positions of any width: entries end to end, and where each position ends.

For what is no row of a step: dicts and columns that a caller appends by hand, ids that one names.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe.records.store.columns import Column, logs_of_rest, narrowed, narrowest_id_dtype
from logprobe.records.store.entries import Entries, RowLists, TopLists

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from logprobe.records.store.columns import Array

OF_ENTRIES: Final = ("entry_ids", "entry_logprobs", "entry_ranks")
OF_ROWS: Final = ("ends", "is_none")


class Ragged:
    """Columns of entries and of rows, each in the narrowest type that has held so far."""

    __slots__ = (*(f"_{name}" for name in (*OF_ENTRIES, *OF_ROWS)), "num_entries", "num_rows")

    def __init__(self) -> None:
        self._entry_ids = Column(np.uint16)  # (N,) uint16, int32 or int64
        self._entry_logprobs = Column(np.float32)  # (N,) float32, float64 from the first value that needs it
        self._entry_ranks = Column(np.int32)  # (N,) int32 or int64; NO_RANK where none was given
        self._ends = Column(np.int32)  # (n,) entries up to and with each row
        self._is_none = Column(np.bool_)  # (n,) rows that read as None
        self.num_entries = 0
        self.num_rows = 0  # published last: a reader that sees a row finds all of it

    @property
    def nbytes(self) -> int:
        """Bytes of the values held."""
        return sum(int(column.nbytes) for column in self.columns().values())

    def append(self, rows: Entries) -> None:
        """Add rows exactly as given."""
        num_new, at, num_rows = len(rows.offsets) - 1, self.num_entries, self.num_rows
        total = at + len(rows.token_ids)
        self._fit(rows, total)
        self._entry_ids.write(at, rows.token_ids)
        self._entry_logprobs.write(at, rows.logprobs)
        self._entry_ranks.write(at, rows.ranks)
        self._is_none.write(num_rows, np.zeros(num_new, np.bool_) if rows.is_none is None else rows.is_none)
        self._ends.write(num_rows, rows.offsets[1:] - rows.offsets[0] + at)
        self.num_entries = total
        self.num_rows = num_rows + num_new

    def _fit(self, rows: Entries, total: int) -> None:
        largest = int(rows.token_ids.max(initial=0))
        id_type = np.promote_types(self._entry_ids.dtype, narrowest_id_dtype(largest))
        if id_type != self._entry_ids.dtype:
            self._entry_ids.widen(id_type, self.num_entries)
        if self._entry_logprobs.dtype == np.float32 and narrowed(rows.logprobs).dtype != np.float32:
            self._entry_logprobs.widen(np.float64, self.num_entries)
        if rows.ranks.max(initial=0) > np.iinfo(self._entry_ranks.dtype).max:
            self._entry_ranks.widen(np.int64, self.num_entries)
        if total > np.iinfo(self._ends.dtype).max:
            self._ends.widen(np.int64, self.num_rows)

    # -- reading -----------------------------------------------------------------------------------------

    def columns(self) -> dict[str, Array]:
        """The columns of all rows, from which `of` builds the same ones."""
        num_rows = self.num_rows
        lengths = dict.fromkeys(OF_ENTRIES, self.first_entry(num_rows)) | dict.fromkeys(OF_ROWS, num_rows)
        return {name: getattr(self, f"_{name}").read(0, length) for name, length in lengths.items()}

    @classmethod
    def of(cls, columns: Mapping[str, Array]) -> Ragged:
        """Wrap what `columns` gave, without a copy."""
        part = cls()
        for name in (*OF_ENTRIES, *OF_ROWS):
            setattr(part, f"_{name}", Column.of(columns[name]))
        part.num_entries, part.num_rows = len(columns["entry_ids"]), len(columns["ends"])
        return part

    def entries(self, start: int, stop: int) -> Entries:
        """The public columns of rows [start, stop)."""
        offsets = np.empty(stop - start + 1, np.int64)
        offsets[0] = first = self.first_entry(start)
        offsets[1:] = self._ends.read(start, stop)
        last = int(offsets[-1])
        return Entries(
            offsets=offsets - first,
            token_ids=self._entry_ids.read(first, last),
            logprobs=self._entry_logprobs.read(first, last),
            ranks=self._entry_ranks.read(first, last),
            is_none=self._is_none.read(start, stop),
        )

    def widths(self, start: int, stop: int) -> Array:
        """Entries of each row of [start, stop), (n,) int64."""
        return np.diff(self._ends.read(start, stop).astype(np.int64), prepend=self.first_entry(start))

    def first_entry(self, row: int) -> int:
        """Number of entries before a row."""
        return int(self._ends.row(row - 1)) if row else 0

    def row(self, row: int) -> RowLists | None:
        """One row as Python values; None for a None row."""
        if self._is_none.row(row):
            return None
        entries = self.entries(row, row + 1)
        return RowLists(entries.token_ids.tolist(), entries.logprobs.tolist(), entries.rank_list())

    def top_lists(self, row: int) -> TopLists | None:
        """The chosen token and the k best of one row as Python values; None where it has no entries."""
        entries = self.entries(row, row + 1)
        ids, logprobs = entries.token_ids.tolist(), entries.logprobs.tolist()
        if not ids:
            return None
        best = _top_of_row(ids, entries.ranks.tolist())
        return TopLists(
            ids[0], logprobs[0], [ids[entry] for entry in best], [logprobs[entry] for entry in best]
        )

    def chosen_entries(self, start: int, stop: int) -> Entries:
        """The chosen token of each row of [start, stop) that has entries."""
        return self._picked(start, stop, lambda ids, _: [0] if ids else [])

    def top_entries(self, start: int, stop: int) -> Entries:
        """The k best of each row of [start, stop) by rank, the chosen token only where it is one of them."""
        return self._picked(start, stop, _top_of_row)

    def _picked(self, start: int, stop: int, pick: Callable[[list[int], list[int]], list[int]]) -> Entries:
        entries = self.entries(start, stop)
        ids, ranks, bounds = entries.token_ids.tolist(), entries.ranks.tolist(), entries.offsets.tolist()
        kept = [
            [first + entry for entry in pick(ids[first:last], ranks[first:last])]
            for first, last in pairwise(bounds)
        ]
        picked = np.array(list(chain.from_iterable(kept)), np.intp)
        return Entries(
            offsets=np.concatenate([[0], np.cumsum([len(row) for row in kept], dtype=np.int64)]),
            token_ids=entries.token_ids[picked],
            logprobs=entries.logprobs[picked],
            ranks=entries.ranks[picked],
            is_none=entries.is_none,
        )

    def other_logprobs(self, start: int, stop: int) -> Array:
        """Log of the mass outside the tokens that each row lists, (n,) float32, nats; NaN for a None row."""
        entries = self.entries(start, stop)
        is_none = self._is_none.read(start, stop)
        rest = np.full(stop - start, np.nan, np.float32)
        for row, (first, last) in enumerate(pairwise(entries.offsets.tolist())):
            if not is_none[row]:
                _, kept = np.unique(entries.token_ids[first:last], return_index=True)
                rest[row] = logs_of_rest(entries.logprobs[first:last][kept][None])[0]
        return rest

    def outside_top_logprobs(self, start: int, stop: int) -> Array:
        """Log of the mass outside the k best of each row, (n,) float32, nats; NaN for a None row."""
        entries, top = self.entries(start, stop), self.top_entries(start, stop)
        is_none = self._is_none.read(start, stop)
        rest = np.full(stop - start, np.nan, np.float32)
        runs = zip(pairwise(entries.offsets.tolist()), pairwise(top.offsets.tolist()), strict=True)
        for row, ((first, last), (best, end)) in enumerate(runs):
            if not is_none[row]:
                rest[row] = logs_of_rest(top.logprobs[best:end][None])[0]
                if first < last and entries.token_ids[first] not in top.token_ids[best:end]:
                    rest[row] = max(rest[row], entries.logprobs[first])  # as in a rectangle
        return rest

    def view(self, start: int, stop: int) -> Ragged:
        """Rows [start, stop) sharing this memory; only where they end is new."""
        first, last = self.first_entry(start), self.first_entry(stop)
        part = Ragged()
        for name in OF_ENTRIES:
            setattr(part, f"_{name}", getattr(self, f"_{name}").view(first, last))
        part._ends = Column.of(self._ends.read(start, stop) - self._ends.dtype.type(first))
        part._is_none = self._is_none.view(start, stop)
        part.num_entries, part.num_rows = last - first, stop - start
        return part


NOTHING: Final = Ragged()
"""The rows of a record that has none of these, to which none is ever added."""


def _top_of_row(ids: list[int], ranks: list[int]) -> list[int]:
    """Entries of one row that are its k best: all but the first, and the first where its place is empty."""
    rest = list(range(1, len(ids)))
    if not ids or ids[0] in ids[1:]:
        return rest
    gap = next((place for place, entry in enumerate(rest) if ranks[entry] != place + 1), len(rest))
    if gap == len(rest) and ranks[0] != gap + 1:
        return rest
    return [*rest[:gap], 0, *rest[gap:]]
