"""Rows of any width in entry columns plus offsets: the store that holds whatever it is given.

Before it: `Rows`, which prefers `TopRows` for regular rows. After it: readers of one position or of whole
columns.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.records.store.columns import Column, logs_of_rest, narrowed, narrowest_id_dtype
from logprobe.records.store.entries import Entries, RowLists, StepRows, TopLists

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.records.store.columns import Array


class RaggedRows:
    """All rows' entries end to end; ranks [r, 1, 2, ...] are implied, a column only where they differ."""

    form = "ragged"
    is_plain = repeats_chosen = False  # its rows may be anything
    k = None
    __slots__ = (
        "_ends",
        "_first_ranks",
        "_is_none",
        "_logprobs",
        "_ranks",
        "_token_ids",
        "num_entries",
        "num_none",
        "num_rows",
    )

    def __init__(self) -> None:
        self._token_ids = Column(
            np.uint16
        )  # (N,) uint16, widened to int32 or int64 by the first id that asks
        self._logprobs = Column(np.float32)  # (N,) float32, float64 from the first value that needs it
        self._ends = Column(np.int32)  # (n,) entries up to and with each row
        self._first_ranks = Column(np.int32)  # (n,) rank of each row's first entry
        self._ranks: Column | None = None  # (N,) every rank, once a row's ranks are not [r, 1, 2, ...]
        self._is_none: Column | None = None  # (n,) bool, once a row is None
        self.num_entries = 0
        self.num_none = 0
        self.num_rows = 0  # published last: a reader that sees a row finds all of it

    @property
    def nbytes(self) -> int:
        """Bytes of the values held."""
        entry = [self._token_ids, self._logprobs, self._ranks]
        row = [self._ends, self._first_ranks, self._is_none]
        per_entry = sum(column.row_nbytes() for column in entry if column is not None)
        return per_entry * self.num_entries + self.num_rows * sum(
            column.row_nbytes() for column in row if column is not None
        )

    # -- writing -----------------------------------------------------------------------------------------

    def append_none(self) -> None:
        """Add a position without entries that reads as None."""
        if self._is_none is None:
            flags = Column.of(np.zeros(self.num_rows, np.bool_))
            flags.write_one(self.num_rows, True)
            self._is_none = flags
        else:
            self._is_none.write_one(self.num_rows, True)
        self._ends.write_one(self.num_rows, self.num_entries)
        self._first_ranks.write_one(self.num_rows, 0)
        self.num_none += 1
        self.num_rows += 1

    def append_entries(self, rows: Entries) -> None:
        """Add a run of rows, exactly as given."""
        num_new, at = len(rows.offsets) - 1, self.num_entries
        total = at + len(rows.token_ids)
        self._fit(rows, total)
        self._token_ids.write(at, rows.token_ids)
        self._logprobs.write(at, rows.logprobs)
        self._write_ranks(rows)
        self._write_none(rows.is_none, num_new)
        self._ends.write(self.num_rows, rows.offsets[1:] - rows.offsets[0] + at)
        self.num_entries = total
        self.num_none += 0 if rows.is_none is None else int(np.count_nonzero(rows.is_none))
        self.num_rows += num_new

    def append_rows(self, rows: StepRows, *, repeats_chosen: bool) -> bool:
        """Add rows of ids and ranks >= 0; this form holds them all."""
        self.append_entries(rows.entries(repeats_chosen=repeats_chosen))
        return True

    def append_one(self, *_: object, **__: object) -> bool:
        """Leave one row to `append_rows`: there is no shorter way into offsets."""
        return False

    def as_ragged(self) -> RaggedRows:
        """This store: it holds any rows."""
        return self

    def _fit(self, rows: Entries, total: int) -> None:
        if len(rows.token_ids):
            needed = np.promote_types(self._token_ids.dtype, narrowest_id_dtype(int(rows.token_ids.max())))
            if needed != self._token_ids.dtype:
                self._token_ids.widen(needed, self.num_entries)
        if narrowed(rows.logprobs).dtype != np.float32 and self._logprobs.dtype == np.float32:
            self._logprobs.widen(np.float64, self.num_entries)
        if total > np.iinfo(self._ends.dtype).max:
            self._ends.widen(np.int64, self.num_rows)

    def _write_ranks(self, rows: Entries) -> None:
        offsets, ranks = rows.offsets - rows.offsets[0], rows.ranks
        firsts = np.zeros(len(offsets) - 1, np.int64)
        filled = offsets[1:] > offsets[:-1]
        firsts[filled] = ranks[offsets[:-1][filled]]
        if self._ranks is None:
            is_small = firsts.size == 0 or (firsts.min() >= 0 and firsts.max() <= np.iinfo(np.int32).max)
            if is_small and np.array_equal(_implied_ranks(offsets, firsts), ranks):
                self._first_ranks.write(self.num_rows, firsts)
                return
            self._ranks = Column.of(self._ranks_of(0, self.num_rows))
        column = self._ranks
        if len(ranks) and ranks.max() > np.iinfo(column.dtype).max:
            column.widen(np.int64, self.num_entries)
        column.write(self.num_entries, ranks)
        self._first_ranks.write(self.num_rows, np.zeros(len(firsts), np.int32))

    def _write_none(self, is_none: Array | None, num_new: int) -> None:
        if is_none is None and self._is_none is None:
            return
        column = self._is_none or Column.of(np.zeros(self.num_rows, np.bool_))
        column.write(self.num_rows, np.zeros(num_new, np.bool_) if is_none is None else is_none)
        self._is_none = column

    # -- reading -----------------------------------------------------------------------------------------

    def entries(self, start: int, stop: int) -> Entries:
        """The public columns of rows [start, stop)."""
        offsets = self.offsets(start, stop)
        first, last = int(offsets[0]), int(offsets[-1])
        flags = self._is_none
        return Entries(
            offsets=offsets - first,
            token_ids=self._token_ids.read(first, last),
            logprobs=self._logprobs.read(first, last),
            ranks=self._ranks_of(start, stop),
            is_none=None if flags is None else flags.read(start, stop),
        )

    def offsets(self, start: int, stop: int) -> Array:
        """Entry offsets of rows [start, stop), (stop - start + 1,) int64, from the store's first entry."""
        offsets = np.empty(stop - start + 1, np.int64)
        offsets[0] = self.first_entry(start)
        offsets[1:] = self._ends.read(start, stop)
        return offsets

    def first_entry(self, row: int) -> int:
        """Number of entries before a row."""
        return int(self._ends.row(row - 1)) if row else 0

    def row(self, row: int) -> RowLists:
        """One row as Python values."""
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
        rest = np.full(stop - start, np.nan, np.float32)
        for row, (first, last) in enumerate(pairwise(entries.offsets.tolist())):
            if entries.is_none is None or not entries.is_none[row]:
                _, kept = np.unique(entries.token_ids[first:last], return_index=True)
                rest[row] = logs_of_rest(entries.logprobs[first:last][kept][None])[0]
        return rest

    def row_of(self, entry: int) -> int:
        """The row that holds entry `entry`."""
        low, high = 0, self.num_rows
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._ends.row(middle) <= entry else (low, middle)
        return low

    def is_none(self, row: int) -> bool:
        """Whether the row was appended as None."""
        return self._is_none is not None and bool(self._is_none.row(row))

    def _ranks_of(self, start: int, stop: int) -> Array:
        offsets = self.offsets(start, stop)
        if self._ranks is not None:
            return self._ranks.read(int(offsets[0]), int(offsets[-1]))
        return _implied_ranks(offsets - offsets[0], self._first_ranks.read(start, stop))

    # -- carrying ----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Scalars and columns from which `from_state` builds the same store."""
        num_rows = self.num_rows
        num_entries = self.first_entry(num_rows)
        lengths = dict.fromkeys(("token_ids", "logprobs", "ranks"), num_entries)
        lengths |= dict.fromkeys(("ends", "first_ranks", "is_none"), num_rows)
        held = {name: getattr(self, f"_{name}") for name in lengths}
        columns = {name: column.read(0, lengths[name]) for name, column in held.items() if column is not None}
        return {"form": self.form, "num_rows": num_rows, "num_none": self.num_none}, columns

    @classmethod
    def from_state(cls, scalars: dict[str, Any], columns: dict[str, Array]) -> RaggedRows:
        """Build a store on columns that `state` gave, without a copy."""
        store = cls()
        for name in ("token_ids", "logprobs", "ends", "first_ranks"):
            setattr(store, f"_{name}", Column.of(columns[name]))
        for name in ("ranks", "is_none"):
            setattr(store, f"_{name}", Column.of(columns[name]) if name in columns else None)
        store.num_none, store.num_rows = scalars["num_none"], scalars["num_rows"]
        store.num_entries = len(columns["token_ids"])
        return store

    # -- cutting -----------------------------------------------------------------------------------------

    def view(self, start: int, stop: int) -> RaggedRows:
        """Rows [start, stop) sharing this store's entries; only the row offsets are new."""
        offsets = self.offsets(start, stop)
        first, last = int(offsets[0]), int(offsets[-1])
        part = RaggedRows()
        part._token_ids = self._token_ids.view(first, last)
        part._logprobs = self._logprobs.view(first, last)
        part._ends = Column.of((offsets[1:] - first).astype(self._ends.dtype))
        part._first_ranks = self._first_ranks.view(start, stop)
        part._ranks = None if self._ranks is None else self._ranks.view(first, last)
        if self._is_none is not None:
            part._is_none = self._is_none.view(start, stop)
            part.num_none = int(np.count_nonzero(part._is_none.read(0, stop - start)))
        part.num_entries, part.num_rows = last - first, stop - start
        return part

    def take(self, rows: Array) -> RaggedRows:
        """The rows named, in that order, copied."""
        part = RaggedRows()
        if len(rows):
            first = int(rows.min())
            part.append_entries(self.entries(first, int(rows.max()) + 1).take(rows - first))
        return part

    def step_rows(self) -> None:
        """None: its rows may be anything."""


def _top_of_row(ids: list[int], ranks: list[int]) -> list[int]:
    """Entries of one row that are its k best: all but the first, and the first where its place is empty."""
    rest = list(range(1, len(ids)))
    if not ids or ids[0] in ids[1:]:
        return rest
    gap = next((place for place, entry in enumerate(rest) if ranks[entry] != place + 1), len(rest))
    if gap == len(rest) and ranks[0] != gap + 1:
        return rest
    return [*rest[:gap], 0, *rest[gap:]]


def _implied_ranks(offsets: Array, first_ranks: Array) -> Array:
    """Ranks (N,) int32 of rows whose entries after the first have ranks 1, 2, ..."""
    widths = np.diff(offsets)
    ranks: Array = (np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], widths)).astype(np.int32)
    filled = widths > 0
    ranks[offsets[:-1][filled]] = first_ranks[filled]
    return ranks
