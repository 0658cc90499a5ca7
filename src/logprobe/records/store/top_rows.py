"""Regular rows in plain columns: the k best tokens, where among them the chosen one stands, and its rank.

A chosen token that is none of the k best stands apart, in row order; its place is k. Nothing else is held, so
a row costs its k entries, a place and a rank.

Before it: `Rows`. After it: readers of one position or of whole columns.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.records.store.columns import Column, chunks, logs_of_rest, narrowest_id_dtype
from logprobe.records.store.entries import Entries, RowLists, StepRows, TopLists
from logprobe.records.store.ragged_rows import RaggedRows

if TYPE_CHECKING:
    from logprobe.records.store.columns import Array

_LARGEST = {2: (1 << 16) - 1, 4: (1 << 31) - 1, 8: (1 << 63) - 1}  # by bytes of the column's type


@dataclass(frozen=True, slots=True, kw_only=True)
class TopColumns:
    """A run of n rows with the chosen tokens in their places."""

    top_ids: Array  # (n, k) uint16, int32 or int64
    top_logprobs: Array  # (n, k) float32, nats, descending as given
    places: Array  # (n,) index of the chosen token among the k best; k where it is outside
    chosen_ids: Array  # (n,)
    chosen_logprobs: Array  # (n,) float32, nats
    chosen_ranks: Array  # (n,) integers

    def joined(self) -> StepRows:
        """The same rows as a step gives them: column 0 the chosen token."""
        ids = np.concatenate([self.chosen_ids[:, None], self.top_ids], axis=1)
        logprobs = np.concatenate([self.chosen_logprobs[:, None], self.top_logprobs], axis=1)
        return StepRows(ids, logprobs, self.chosen_ranks)


class TopRows:
    """Rows of the k best tokens plus the chosen one; leading positions may be None.

    `repeats_chosen` says whether the public columns show a chosen token that is among the k best twice, as
    they were given by `append_fast`, or once.
    """

    form = "top"
    __slots__ = (
        "_before",
        "_logprobs",
        "_outside_ids",
        "_outside_logprobs",
        "_places",
        "_ranks",
        "_token_ids",
        "k",
        "num_none",
        "num_outside",
        "num_rows",
        "repeats_chosen",
    )

    def __init__(self, k: int, *, num_none: int = 0, repeats_chosen: bool = False) -> None:
        self.k, self.num_none, self.repeats_chosen = k, num_none, repeats_chosen
        self._token_ids = Column(np.uint16, k)  # (n, k)
        self._logprobs = Column(np.float32, k)  # (n, k) nats
        self._places = Column(np.min_scalar_type(k))  # (n,) index of the chosen among the k best; k: outside
        self._ranks = Column(np.uint16)  # (n,) of the chosen token
        self._outside_ids = Column(np.uint16)  # (m,) chosen tokens outside the k best, in row order
        self._outside_logprobs = Column(np.float32)  # (m,)
        self._before: list[int] = []  # chosen tokens outside the k best, before each block of places
        self.num_outside = 0
        self.num_rows = num_none  # published last: a reader that sees a row finds all of it

    @property
    def nbytes(self) -> int:
        """Bytes of the values held."""
        row = (self._token_ids, self._logprobs, self._places, self._ranks)
        outside = (self._outside_ids, self._outside_logprobs)
        num_rows = self.num_rows - self.num_none
        return num_rows * sum(column.row_nbytes() for column in row) + self.num_outside * sum(
            column.row_nbytes() for column in outside
        )

    @property
    def is_plain(self) -> bool:
        """Whether every row is 'chosen + k best' with the chosen token shown once."""
        return not self.repeats_chosen

    # -- writing -----------------------------------------------------------------------------------------

    def append_rows(self, rows: StepRows, *, repeats_chosen: bool) -> bool:
        """Add rows of ids and ranks >= 0 if this form holds them exactly; say whether it did.

        It does not hold another k, float64, or a chosen token that stands twice among the k best or with
        another value than its own.
        """
        token_ids, logprobs, ranks = rows
        if token_ids.shape[1] != self.k + 1 or repeats_chosen != self.repeats_chosen:
            return False
        hits = token_ids[:, 1:] == token_ids[:, :1]
        is_inside = hits.any(axis=1)
        if logprobs.dtype != np.float32 or not _agree(logprobs, hits, is_inside):
            return False
        at = self.num_rows - self.num_none
        self._fit(int(token_ids.max(initial=0)), int(ranks.max(initial=0)))
        self._token_ids.write(at, token_ids[:, 1:])
        self._logprobs.write(at, np.float32(0) + logprobs[:, 1:])  # -0.0 becomes 0.0
        self._places.write(at, np.where(is_inside, hits.argmax(axis=1), self.k) if self.k else ranks * 0)
        self._ranks.write(at, ranks)
        self._write_outside(at, ~is_inside, token_ids[:, 0], logprobs[:, 0])
        self.num_rows += len(token_ids)
        return True

    def append_one(self, ids: list[int], logprobs: list[float], rank: int, *, repeats_chosen: bool) -> bool:
        """`append_rows` of one narrow row in a few microseconds; False where `append_rows` should look."""
        k, at = self.k, self.num_rows - self.num_none
        is_other = len(ids) != k + 1 or repeats_chosen != self.repeats_chosen
        if is_other or max(ids) > _LARGEST[self._token_ids.dtype.itemsize]:
            return False
        count = ids.count(ids[0])
        place = k if count == 1 else ids.index(ids[0], 1) - 1
        if count > 2 or (count == 2 and logprobs[place + 1] != logprobs[0]):
            return False
        row = np.array(logprobs, np.float32)
        if row.tolist() != logprobs or rank > _LARGEST[self._ranks.dtype.itemsize]:
            return False
        row += np.float32(0)
        self._token_ids.write_one(at, ids[1:])
        self._logprobs.write_one(at, row[1:])
        self._places.write_one(at, place)
        self._ranks.write_one(at, rank)
        if len(self._before) < len(self._places.starts):
            self._before.append(self.num_outside)
        if place == k:
            self._outside_ids.write_one(self.num_outside, ids[0])
            self._outside_logprobs.write_one(self.num_outside, row[0])
            self.num_outside += 1
        self.num_rows += 1
        return True

    def _fit(self, largest_id: int, largest_rank: int) -> None:
        num_rows = self.num_rows - self.num_none
        if largest_id > _LARGEST[self._token_ids.dtype.itemsize]:
            self._token_ids.widen(narrowest_id_dtype(largest_id), num_rows)
            self._outside_ids.widen(narrowest_id_dtype(largest_id), self.num_outside)
        if largest_rank > _LARGEST[self._ranks.dtype.itemsize]:
            self._ranks.widen(narrowest_id_dtype(largest_rank), num_rows)

    def _write_outside(self, at: int, is_outside: Array, ids: Array, logprobs: Array) -> None:
        before, starts = self.num_outside, self._places.starts
        while len(self._before) < len(starts):
            start = starts[len(self._before)]
            self._before.append(before + int(np.count_nonzero(is_outside[: start - at])))
        rows = np.flatnonzero(is_outside)
        if len(rows):
            self._outside_ids.write(before, ids[rows])
            self._outside_logprobs.write(before, np.float32(0) + logprobs[rows])
            self.num_outside += len(rows)

    def as_ragged(self) -> RaggedRows:
        """The same rows in a store that holds any."""
        ragged = RaggedRows()
        for start, stop in chunks(self.num_rows):
            ragged.append_entries(self.entries(start, stop))
        return ragged

    # -- reading -----------------------------------------------------------------------------------------

    def top_lists(self, row: int) -> TopLists:
        """The chosen token and the k best of one row, not None, as Python values."""
        at = row - self.num_none
        ids, logprobs = self._token_ids.row(at).tolist(), self._logprobs.row(at).tolist()
        place = int(self._places.row(at))
        if place < self.k:
            return TopLists(ids[place], logprobs[place], ids, logprobs)
        outside = self._num_outside_before(at)
        chosen_id, logprob = self._outside_ids.row(outside), self._outside_logprobs.row(outside)
        return TopLists(int(chosen_id), float(logprob), ids, logprobs)

    def row(self, row: int) -> RowLists:
        """One row, not None, as Python values."""
        chosen_id, chosen_logprob, ids, logprobs = self.top_lists(row)
        place, rank = int(self._places.row(row - self.num_none)), int(self._ranks.row(row - self.num_none))
        ranks = list(range(1, self.k + 1))
        if not self.repeats_chosen:
            for column in (ids, logprobs, ranks):
                del column[place : place + 1]  # none where it is outside
        return RowLists([chosen_id, *ids], [chosen_logprob, *logprobs], [rank, *ranks])

    def columns(self, start: int, stop: int) -> TopColumns:
        """Rows [start, stop), none of them None."""
        first, last = start - self.num_none, stop - self.num_none
        top_ids, top_logprobs = self._token_ids.read(first, last), self._logprobs.read(first, last)
        places = self._places.read(first, last)
        chosen_ids, chosen_logprobs = np.empty(len(places), top_ids.dtype), np.empty(len(places), np.float32)
        is_outside = places == self.k
        inside = np.flatnonzero(~is_outside)
        chosen_ids[inside] = top_ids[inside, places[inside]]
        chosen_logprobs[inside] = top_logprobs[inside, places[inside]]
        before, after = self._num_outside_before(first), self._num_outside_before(last)
        chosen_ids[is_outside] = self._outside_ids.read(before, after)
        chosen_logprobs[is_outside] = self._outside_logprobs.read(before, after)
        return TopColumns(
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            places=places,
            chosen_ids=chosen_ids,
            chosen_logprobs=chosen_logprobs,
            chosen_ranks=self._ranks.read(first, last),
        )

    def entries(self, start: int, stop: int) -> Entries:
        """The public columns of rows [start, stop)."""
        num_none = self._num_none_in(start, stop)
        rows = self.columns(start + num_none, stop).joined()
        flat = rows.entries(repeats_chosen=self.repeats_chosen)
        return self._behind_none(num_none, flat)

    def chosen_entries(self, start: int, stop: int) -> Entries:
        """The chosen token of each row of [start, stop) that has entries."""
        num_none = self._num_none_in(start, stop)
        rows = self.columns(start + num_none, stop)
        chosen = Entries(
            offsets=np.arange(len(rows.places) + 1),
            token_ids=rows.chosen_ids,
            logprobs=rows.chosen_logprobs,
            ranks=rows.chosen_ranks,
        )
        return self._behind_none(num_none, chosen)

    def top_entries(self, start: int, stop: int) -> Entries:
        """The k best of each row of [start, stop), by rank."""
        num_none = self._num_none_in(start, stop)
        first, last = start + num_none - self.num_none, stop - self.num_none
        best = Entries(
            offsets=np.arange(last - first + 1) * self.k,
            token_ids=self._token_ids.read(first, last).ravel(),
            logprobs=self._logprobs.read(first, last).ravel(),
            ranks=np.tile(np.arange(1, self.k + 1), last - first),
        )
        return self._behind_none(num_none, best)

    def _num_none_in(self, start: int, stop: int) -> int:
        return max(min(stop, self.num_none) - start, 0)

    def _behind_none(self, num_none: int, entries: Entries) -> Entries:
        if not num_none:
            return entries
        offsets = np.concatenate([np.zeros(num_none, np.int64), entries.offsets])
        return Entries(
            offsets=offsets,
            token_ids=entries.token_ids,
            logprobs=entries.logprobs,
            ranks=entries.ranks,
            is_none=np.arange(len(offsets) - 1) < num_none,
        )

    def other_logprobs(self, start: int, stop: int) -> Array:
        """Log of the mass outside the tokens that each row lists, (n,) float32, nats; NaN for a None row."""
        num_none = self._num_none_in(start, stop)
        rows = self.columns(start + num_none, stop)
        outside = np.where(rows.places == self.k, rows.chosen_logprobs, -np.inf)
        rest = np.full(stop - start, np.nan, np.float32)
        rest[num_none:] = logs_of_rest(np.column_stack([rows.top_logprobs, outside]))
        return rest

    def offsets(self, start: int, stop: int) -> Array:
        """Entry offsets of rows [start, stop), (stop - start + 1,) int64, from the store's first entry."""
        rows = np.maximum(np.arange(start, stop + 1, dtype=np.int64) - self.num_none, 0)
        if self.repeats_chosen:
            return rows * (self.k + 1)
        offsets = rows * self.k
        first, last = int(rows[0]), int(rows[-1])
        offsets += self._num_outside_before(first)
        num_none = len(rows) - 1 - (last - first)
        offsets[num_none + 1 :] += np.cumsum(self._places.read(first, last) == self.k)
        return offsets

    def row_of(self, entry: int) -> int:
        """The row that holds entry `entry`."""
        low, high = self.num_none, self.num_rows - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.first_entry(middle) <= entry else (low, middle - 1)
        return low

    def is_none(self, row: int) -> bool:
        """Whether the position was appended as None."""
        return row < self.num_none

    def first_entry(self, row: int) -> int:
        """Number of entries before a row."""
        row = max(row - self.num_none, 0)
        return row * (self.k + 1) if self.repeats_chosen else row * self.k + self._num_outside_before(row)

    def _num_outside_before(self, row: int) -> int:
        starts = self._places.starts
        number = bisect_right(starts, row, hi=len(self._before)) - 1
        if number < 0:
            return 0
        return self._before[number] + int(np.count_nonzero(self._places.read(starts[number], row) == self.k))

    # -- carrying ----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Scalars and columns from which `from_state` builds the same store."""
        num_rows = self.num_rows - self.num_none
        lengths = dict.fromkeys(("token_ids", "logprobs", "places", "ranks"), num_rows)
        lengths |= dict.fromkeys(("outside_ids", "outside_logprobs"), self._num_outside_before(num_rows))
        scalars = {name: getattr(self, name) for name in ("form", "num_none", "k", "repeats_chosen")}
        columns = {name: getattr(self, f"_{name}").read(0, length) for name, length in lengths.items()}
        return scalars | {"num_rows": self.num_none + num_rows}, columns

    @classmethod
    def from_state(cls, scalars: dict[str, Any], columns: dict[str, Array]) -> TopRows:
        """Build a store on columns that `state` gave, without a copy."""
        store = cls(scalars["k"], num_none=scalars["num_none"], repeats_chosen=scalars["repeats_chosen"])
        for name in ("token_ids", "logprobs", "places", "ranks", "outside_ids", "outside_logprobs"):
            setattr(store, f"_{name}", Column.of(columns[name]))
        store._before = [0 for _ in store._places.starts]
        store.num_outside, store.num_rows = len(columns["outside_ids"]), scalars["num_rows"]
        return store

    # -- cutting -----------------------------------------------------------------------------------------

    def view(self, start: int, stop: int) -> TopRows:
        """Rows [start, stop) sharing this store's memory."""
        part = TopRows(self.k, num_none=self._num_none_in(start, stop), repeats_chosen=self.repeats_chosen)
        first, last = max(start - self.num_none, 0), max(stop - self.num_none, 0)
        before, after = self._num_outside_before(first), self._num_outside_before(last)
        for name in ("_token_ids", "_logprobs", "_places", "_ranks"):
            setattr(part, name, getattr(self, name).view(first, last))
        part._outside_ids = self._outside_ids.view(before, after)
        part._outside_logprobs = self._outside_logprobs.view(before, after)
        part._before = [self._num_outside_before(first + at) - before for at in part._places.starts]
        part.num_outside, part.num_rows = after - before, stop - start
        return part

    def take(self, rows: Array) -> TopRows | RaggedRows:
        """The rows named, in that order, copied; ragged where a None row would not stand in front."""
        is_none = rows < self.num_none
        num_none = int(np.count_nonzero(is_none))
        if is_none[num_none:].any():
            return self.as_ragged().take(rows)
        part = TopRows(self.k, num_none=num_none, repeats_chosen=self.repeats_chosen)
        part.num_rows = num_none
        if num_none < len(rows):
            first = int(rows[num_none:].min())
            there = self.columns(first, int(rows.max()) + 1).joined()
            kept = StepRows(*(column[rows[num_none:] - first] for column in there))
            part.append_rows(kept, repeats_chosen=self.repeats_chosen)
        return part

    def step_rows(self) -> StepRows | None:
        """All rows behind the None ones, as a step gives them."""
        return self.columns(self.num_none, self.num_rows).joined()


def _agree(logprobs: Array, hits: Array, is_inside: Array) -> bool:
    """Whether each chosen token found among the k best stands there once, with the same value."""
    agreeing = hits & (logprobs[:, 1:] == logprobs[:, :1])
    return int(np.count_nonzero(is_inside)) == int(np.count_nonzero(hits)) == int(np.count_nonzero(agreeing))
