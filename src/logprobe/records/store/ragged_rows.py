"""Rows of any width in entry columns plus offsets: the store that holds whatever it is given.

Before it: `FlatLogprobs`, which prefers `TopRows` for regular rows. After it: readers of one position or of
whole columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from logprobe.records.store.columns import Array, Column, narrowed, narrowest_id_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_RANK = -1  # in the typed rank columns only; readers see None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The public columns of a run of n positions holding N entries."""

    offsets: Array  # (n + 1,) int64: position i owns entries [offsets[i], offsets[i + 1])
    token_ids: Array  # (N,) unsigned or signed integers
    logprobs: Array  # (N,) float32 or float64, nats
    ranks: Array  # (N,) int32 or int64; NO_RANK where none was given
    is_none: Array | None = None  # (n,) bool: positions appended as None; None where there are none
    texts: list[str | None] | None = None  # N texts given with the entries; None where none was

    def take(self, rows: Array) -> Entries:
        """The rows named, in that order."""
        widths = np.diff(self.offsets)[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(widths, out=offsets[1:])
        picked = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], widths)
        return Entries(
            offsets=offsets,
            token_ids=self.token_ids[picked],
            logprobs=self.logprobs[picked],
            ranks=self.ranks[picked],
            is_none=None if self.is_none is None else self.is_none[rows],
            texts=None if self.texts is None else [self.texts[entry] for entry in picked.tolist()],
        )

    def rank_list(self) -> list[int | None]:
        """Ranks as Python values, None where none was given."""
        ranks: list[int | None] = self.ranks.tolist()
        return [None if rank == NO_RANK else rank for rank in ranks] if NO_RANK in ranks else ranks


class RowLists(NamedTuple):
    """The entries of one position as Python values, the chosen token first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: Sequence[int | None]
    texts: Sequence[str | None] | None  # None where no text was given with the entries


class RaggedRows:
    """All rows' entries end to end; ranks [r, 1, 2, ...] are implied, a column only where they differ."""

    __slots__ = (
        "_code_of_text",
        "_ends",
        "_first_ranks",
        "_is_none",
        "_logprobs",
        "_ranks",
        "_text_codes",
        "_text_of_code",
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
        self._text_codes: Column | None = None  # (N,) place in _text_of_code, once a text was given
        self._text_of_code: list[str | None] = [None]
        self._code_of_text: dict[str | None, int] = {None: 0}
        self.num_entries = 0
        self.num_none = 0
        self.num_rows = 0  # published last: a reader that sees a row finds all of it

    @property
    def nbytes(self) -> int:
        """Bytes of the values held, texts not counted."""
        entry = [self._token_ids, self._logprobs, self._ranks, self._text_codes]
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
        self._write_texts(rows)
        self._write_none(rows.is_none, num_new)
        self._ends.write(self.num_rows, rows.offsets[1:] - rows.offsets[0] + at)
        self.num_entries = total
        self.num_none += 0 if rows.is_none is None else int(np.count_nonzero(rows.is_none))
        self.num_rows += num_new

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

    def _write_texts(self, rows: Entries) -> None:
        if rows.texts is None and self._text_codes is None:
            return
        codes = np.zeros(len(rows.token_ids), np.int32)
        if rows.texts is not None:
            codes[:] = [self._code(text) for text in rows.texts]
        if self._text_codes is None:
            column = Column.of(np.zeros(self.num_entries, np.uint16))
        else:
            column = self._text_codes
        if len(self._text_of_code) > np.iinfo(np.uint16).max and column.dtype == np.uint16:
            column.widen(np.int32, self.num_entries)
        column.write(self.num_entries, codes)
        self._text_codes = column

    def _code(self, text: str | None) -> int:
        code = self._code_of_text.setdefault(text, len(self._text_of_code))
        if code == len(self._text_of_code):
            self._text_of_code.append(text)
        return code

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
        codes = self._text_codes
        flags = self._is_none
        return Entries(
            offsets=offsets - first,
            token_ids=self._token_ids.read(first, last),
            logprobs=self._logprobs.read(first, last),
            ranks=self._ranks_of(start, stop),
            is_none=None if flags is None else flags.read(start, stop),
            texts=None if codes is None else self._texts(codes.read(first, last)),
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
        return RowLists(
            entries.token_ids.tolist(), entries.logprobs.tolist(), entries.rank_list(), entries.texts
        )

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

    def _texts(self, codes: Array) -> list[str | None]:
        return [self._text_of_code[code] for code in codes.tolist()]

    # -- carrying ----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Scalars and columns from which `from_state` builds the same store."""
        num_rows = self.num_rows
        num_entries = self.first_entry(num_rows)
        lengths = dict.fromkeys(("token_ids", "logprobs", "ranks", "text_codes"), num_entries)
        lengths |= dict.fromkeys(("ends", "first_ranks", "is_none"), num_rows)
        held = {name: getattr(self, f"_{name}") for name in lengths}
        columns = {name: column.read(0, lengths[name]) for name, column in held.items() if column is not None}
        texts = self._text_of_code if "text_codes" in columns else []
        return {"num_rows": num_rows, "num_none": self.num_none, "texts": texts}, columns

    @classmethod
    def from_state(cls, scalars: dict[str, Any], columns: dict[str, Array]) -> RaggedRows:
        """Build a store on columns that `state` gave, without a copy."""
        store = cls()
        for name in ("token_ids", "logprobs", "ends", "first_ranks"):
            setattr(store, f"_{name}", Column.of(columns[name]))
        for name in ("ranks", "is_none", "text_codes"):
            setattr(store, f"_{name}", Column.of(columns[name]) if name in columns else None)
        if scalars["texts"]:
            store._text_of_code = list(scalars["texts"])
            store._code_of_text = {text: code for code, text in enumerate(store._text_of_code)}
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
        if self._text_codes is not None:
            part._text_codes = self._text_codes.view(first, last)
            part._text_of_code, part._code_of_text = self._text_of_code.copy(), self._code_of_text.copy()
        part.num_entries, part.num_rows = last - first, stop - start
        return part

    def take(self, rows: Array) -> RaggedRows:
        """The rows named, in that order, copied."""
        part = RaggedRows()
        if len(rows):
            first = int(rows.min())
            part.append_entries(self.entries(first, int(rows.max()) + 1).take(rows - first))
        return part


def _implied_ranks(offsets: Array, first_ranks: Array) -> Array:
    """Ranks (N,) int32 of rows whose entries after the first have ranks 1, 2, ..."""
    widths = np.diff(offsets)
    ranks: Array = (np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], widths)).astype(np.int32)
    filled = widths > 0
    ranks[offsets[:-1][filled]] = first_ranks[filled]
    return ranks
