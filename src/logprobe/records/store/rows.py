"""The positions of one record and their optional data, in columns that grow.

A record consists of leading positions without a prediction, then rows of one width (`Steps`), then all other
positions (`Entries`). Step rows that follow a position of another form are stored as `Entries` too.
"""

from __future__ import annotations

from itertools import repeat
from math import inf
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.rows import EXTRAS
from logprobe.records.store.columns import MAX_WAITING, Column, pack_integers, spans
from logprobe.records.store.entries import (
    Entries,
    RowLists,
    TopLists,
    ranks_of,
    top_of_row,
)
from logprobe.records.store.steps import Steps
from logprobe.records.values import IdLists

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from logprobe.records.info import LogprobsInfo
    from logprobe.records.store.columns import Array

MAX_ROW_WIDTH: Final = 65  # wider single rows are faster as arrays than as Python values
_ndarray, _ONE = np.ndarray, (1,)  # bound once: `append_one` runs for every token


class Rows:
    """Everything in a record but its token table.

    One thread may append while others read: columns only grow, and a writer sets `num_rows` last. Optional
    columns may be shorter than the record; values are missing at the positions that they do not reach.
    """

    __slots__ = (
        "ends",
        "extra_columns",
        "given_rows",
        "ids",
        "info",
        "is_none",
        "kept_ends",
        "kept_ids",
        "logprobs",
        "num_none",
        "num_rows",
        "num_steps",
        "ranks",
        "repeats_chosen",
        "texts",
        "width",
    )

    def __init__(self, info: LogprobsInfo | None = None) -> None:
        self.info = info
        self.num_rows = 0
        self.num_none = 0  # leading positions without a prediction
        self.num_steps = 0  # rows of `Steps` after them
        self.width, self.repeats_chosen = 1, False  # of the rows of `Steps`
        # Each row of `Steps` has `width` entries and one rank; the entries and ranks of `Entries` follow.
        self.ids = Column("I")
        self.logprobs = Column("d")
        self.ranks = Column("I")
        self.texts: list[str | None] | None = None  # of each entry; None if none was given
        # Of the positions in `Entries`: the number of entries up to their end, and whether they are None.
        self.ends = Column("I")
        self.is_none = Column("B")
        self.extra_columns: dict[str, Column] = {}
        self.given_rows: Rows | None = None  # caller-specified ids per position
        self.kept_ends: Column | None = None  # number of ids up to a position's end
        self.kept_ids = Column("I")  # ids that truncation and masks kept

    # -- growing -----------------------------------------------------------------------------------------

    def append_none(self, count: int = 1) -> None:
        """Add `count` positions without a prediction."""
        if self.num_rows > self.num_none:
            self.append_entries(Entries.none(count))
            return
        self.num_none += count
        self.num_rows += count

    def append_one(self, token_ids: Any, logprobs: Any, ranks: Any) -> bool:
        """Add one row of a step's arrays to `Steps`; return False if it does not fit or is invalid."""
        if not (
            type(token_ids) is type(logprobs) is type(ranks) is _ndarray
            and ranks.shape == _ONE
            and token_ids.shape == logprobs.shape == (1, self.width)
            and self.width <= MAX_ROW_WIDTH
        ):
            return False
        [ids], [values], [rank] = token_ids.tolist(), logprobs.tolist(), ranks.tolist()
        return self.append_step(ids, values, rank, None, False)

    def append_step(
        self,
        ids: list[int],
        logprobs: list[float],
        rank: Any,
        texts: list[str | None] | None,
        repeats_chosen: bool,
    ) -> bool:
        """Add one row with ranks [rank, 1, 2, ...] to `Steps`.

        Return False, without adding anything, if the row does not fit or is invalid.
        """
        width = len(ids)
        if inf in logprobs or not self._takes_steps(width, repeats_chosen):
            return False
        try:  # to unsigned buffers, so that a negative number raises OverflowError
            self.ids.waiting.fromlist(ids)
            self.logprobs.waiting.fromlist(logprobs)
            self.ranks.waiting.append(rank)
        except BaseException as error:  # also one raised by the caller's number types, or an interrupt
            self.ids.truncate(self.num_steps * width)
            self.logprobs.truncate(self.num_steps * width)
            if isinstance(error, TypeError | OverflowError):
                return False
            raise
        if texts is not None or self.texts is not None:
            self._write_texts(texts, self.num_steps * width, width)
        self.num_steps += 1
        self.num_rows += 1
        if len(self.ids.waiting) >= MAX_WAITING:
            for column in (self.ids, self.logprobs, self.ranks):
                column.flush_full()
        return True

    def append_steps(self, steps: Steps) -> None:
        """Add rows validated by `Steps.of`."""
        num_rows, width = steps.token_ids.shape
        if not num_rows:
            return
        if not self._takes_steps(width, steps.repeats_chosen):
            self.append_entries(steps.entries())
            return
        self._write_texts(steps.texts, len(self.ids), steps.token_ids.size)
        self.ids.append(steps.token_ids.ravel())
        self.logprobs.append(steps.logprobs.ravel())
        self.ranks.append(steps.ranks)
        self.num_steps += num_rows
        self.num_rows += num_rows

    def append_entries(self, entries: Entries) -> None:
        """Add positions exactly as given."""
        if not entries.num_rows:
            return
        num_before = len(self.ids) - self.num_steps * self.width
        self._write_texts(entries.texts, len(self.ids), len(entries.token_ids))
        self.ids.append(entries.token_ids)
        self.logprobs.append(entries.logprobs)
        self.ranks.append(entries.ranks)
        self.is_none.append(entries.none_flags())
        self.ends.append(entries.offsets[1:] - entries.offsets[0] + num_before)
        self.num_rows += entries.num_rows

    def append_beside(
        self,
        num_new: int,
        extras: Mapping[str, npt.ArrayLike | None],
        given: Entries | None = None,
        kept: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    ) -> None:
        """Add the optional data of the next `num_new` positions; call this before adding the positions.

        Raises:
            ParameterError: a column is unknown or does not have `num_new` values. Nothing is added then.
        """
        for name in extras.keys() - EXTRAS.keys():
            raise ParameterError(name, f"unknown column; known: {', '.join(EXTRAS)}")
        values = {
            name: np.array(column, EXTRAS[name]) for name, column in extras.items() if column is not None
        }
        for name, column in values.items():
            if column.shape != (num_new,):
                raise ParameterError(
                    name, f"has shape {column.shape} for {num_new} positions; give one value per position"
                )
        if given is not None:
            _check_offsets("given", given.offsets, num_new)
        if kept is not None:
            offsets, ids = np.asarray(kept[0], np.int64), np.asarray(kept[1])
            _check_offsets("kept", offsets, num_new)
            if ids.shape != (int(offsets[-1] - offsets[0]),):
                raise ParameterError("kept", f"offsets end at {offsets[-1]}, but ids have shape {ids.shape}")
            self._append_kept(offsets, ids)
        for name, column in values.items():
            own = self.extra_columns.get(name) or Column("f")
            if len(own) < self.num_rows:
                own.append(np.full(self.num_rows - len(own), np.nan, EXTRAS[name]))
            own.append(column)
            self.extra_columns[name] = own
        if given is not None:
            named = self.given_rows or Rows()
            named.append_none(self.num_rows - named.num_rows)
            named.append_entries(given)
            self.given_rows = named

    def _append_kept(self, offsets: Array, ids: Array) -> None:
        ends, num_before = self.kept_ends or Column("I"), len(self.kept_ids)
        self.kept_ids.append(ids)
        ends.append(np.full(self.num_rows - len(ends), num_before))
        ends.append(offsets[1:] - offsets[0] + num_before)
        self.kept_ends = ends

    def extend(self, other: Rows) -> None:
        """Add the positions of another record, which no thread may be appending to."""
        length = other.num_rows
        given, kept = other.given(0, length), other.kept(0, length)
        self.append_beside(
            length,
            other.extras(0, length),
            None if given is None else given.entries(0, length),
            None if kept is None else (kept.offsets, kept.token_ids),
        )
        num_none, steps, others = other.split(0, length)
        self.append_none(num_none)
        self.append_steps(steps)
        self.append_entries(others)

    def _takes_steps(self, width: int, repeats_chosen: bool) -> bool:
        """Return True if rows of this form can be added to `Steps`; the first rows determine the form."""
        if self.num_rows == self.num_none and width:
            self.width, self.repeats_chosen = width, repeats_chosen
        return (
            width == self.width
            and repeats_chosen is self.repeats_chosen
            and self.num_rows == self.num_none + self.num_steps
        )

    def _write_texts(self, texts: list[str | None] | None, num_before: int, count: int) -> None:
        """Store the texts of `count` entries that follow `num_before` entries."""
        if self.texts is not None:
            self.texts += texts or [None] * count
        elif texts is not None:
            self.texts = [*repeat(None, num_before), *texts]

    # -- reading -----------------------------------------------------------------------------------------

    def end_of(self, place: int) -> int:
        """Return the number of entries in `Entries` before its position `place`."""
        return int(self.ends.tolist(place - 1, place)[0]) if place else 0

    def spans_of(self, start: int, stop: int) -> tuple[range, range, slice, slice]:
        """Return rows [start, stop) as ranges of `Steps` and `Entries`, and slices of entries and ranks."""
        num_none, num_steps, width = self.num_none, self.num_steps, self.width
        first, last = max(start - num_none, 0), max(stop - num_none, 0)
        steps = range(min(first, num_steps), min(last, num_steps))
        others = range(first - steps.start, last - steps.stop)
        before, after = self.end_of(others.start), self.end_of(others.stop)
        cells = slice(steps.start * width + before, steps.stop * width + after)
        return steps, others, cells, slice(steps.start + before, steps.stop + after)

    def split(self, start: int, stop: int) -> tuple[int, Steps, Entries]:
        """Return rows [start, stop) as stored.

        They are a number of positions without a prediction, followed by `Steps`, followed by `Entries`.
        """
        steps, others, cells, ranks = self.spans_of(start, stop)
        middle, width = cells.start + len(steps) * self.width, self.width
        ends = self.ends.read(others.start, others.stop).astype(np.int64)
        offsets = np.concatenate([[0], ends - self.end_of(others.start)])
        texts = self.texts
        return (
            stop - start - len(steps) - len(others),
            Steps(
                self.ids.read(cells.start, middle).reshape(-1, width),
                self.logprobs.read(cells.start, middle).reshape(-1, width),
                self.ranks.read(ranks.start, ranks.start + len(steps)),
                self.repeats_chosen,
                texts and texts[cells.start : middle],
            ),
            Entries(
                offsets=offsets,
                token_ids=self.ids.read(middle, cells.stop),
                logprobs=self.logprobs.read(middle, cells.stop),
                ranks=self.ranks.read(ranks.start + len(steps), ranks.stop),
                is_none=self.is_none.read(others.start, others.stop),
                texts=texts and texts[middle : cells.stop],
            ),
        )

    def row(self, row: int) -> RowLists | None:
        """Return one row as Python values; None if the position has no prediction."""
        place = row - self.num_none
        if place < 0:
            return None
        is_step = place < self.num_steps
        if is_step:
            start, stop = place * self.width, (place + 1) * self.width
            ranks = [*self.ranks.tolist(place, place + 1), *range(1, self.width)]
        else:
            place -= self.num_steps
            if self.is_none.tolist(place, place + 1)[0]:
                return None
            before, after, first = self.end_of(place), self.end_of(place + 1), self.num_steps * self.width
            start, stop = first + before, first + after
            ranks = ranks_of(self.ranks.tolist(self.num_steps + before, self.num_steps + after))
        ids, logprobs = self.ids.tolist(start, stop), self.logprobs.tolist(start, stop)
        texts = self.texts and self.texts[start:stop]
        if is_step and not self.repeats_chosen:
            while ids.count(ids[0]) > 1:
                repeated = ids.index(ids[0], 1)
                for column in (ids, logprobs, ranks, texts):
                    if column is not None:
                        del column[repeated]
        return RowLists(ids, logprobs, ranks, texts)

    def top_lists(self, row: int) -> TopLists | None:
        """Return the chosen token and the k most likely tokens of one row; None if the row has no entries."""
        place = row - self.num_none
        if 0 <= place < self.num_steps:
            start, stop = place * self.width, (place + 1) * self.width
            ids, logprobs = self.ids.tolist(start, stop), self.logprobs.tolist(start, stop)
            return TopLists(ids[0], logprobs[0], ids[1:], logprobs[1:])
        lists = self.row(row)
        if lists is None or not lists.token_ids:
            return None
        ids, logprobs = lists.token_ids, lists.logprobs
        best = top_of_row(ids, lists.ranks)
        return TopLists(ids[0], logprobs[0], [ids[one] for one in best], [logprobs[one] for one in best])

    def entries(self, start: int, stop: int) -> Entries:
        """Return the entries of rows [start, stop)."""
        num_none, steps, others = self.split(start, stop)
        return Entries.joined([Entries.none(num_none), steps.entries(), others])

    def chosen_entries(self, start: int, stop: int) -> Entries:
        """Return the chosen token of each row in [start, stop) that has entries."""
        num_none, steps, others = self.split(start, stop)
        return Entries.joined([Entries.none(num_none), steps.chosen_entries(), others.chosen_entries()])

    def top_entries(self, start: int, stop: int) -> Entries:
        """Return the k most likely tokens of each row in [start, stop), by rank."""
        num_none, steps, others = self.split(start, stop)
        return Entries.joined([Entries.none(num_none), steps.top_entries(), others.top_entries()])

    def extras(self, start: int, stop: int) -> dict[str, Array]:
        """Return the extra columns that have values, for positions [start, stop)."""
        columns = {name: self.extra_columns[name] for name in EXTRAS if name in self.extra_columns}
        found = {
            name: column.read(min(start, len(column)), min(stop, len(column)))
            for name, column in columns.items()
        }
        return {
            name: np.concatenate([values, np.full(stop - start - len(values), np.nan, values.dtype)])
            for name, values in found.items()
        }

    def given(self, start: int, stop: int) -> Rows | None:
        """Return the caller-specified ids of positions [start, stop); None if there are none."""
        if self.given_rows is None:
            return None
        length = self.given_rows.num_rows
        part = self.given_rows.cut(range(min(start, length), min(stop, length)))
        part.append_none(stop - start - part.num_rows)
        return part

    def kept(self, start: int, stop: int) -> IdLists | None:
        """Return the ids kept by masks and truncation at positions [start, stop); None if there are none."""
        if self.kept_ends is None:
            return None
        length = len(self.kept_ends)
        first, last = min(start, length), min(stop, length)
        ends = self.kept_ends.read(max(first - 1, 0), last).astype(np.int64)
        offsets = ends if first else np.concatenate([np.zeros(1, np.int64), ends])
        offsets = np.concatenate([offsets, np.full(stop - start - (last - first), offsets[-1])])
        return IdLists(offsets - offsets[0], self.kept_ids.read(int(offsets[0]), int(offsets[-1])))

    @property
    def num_entries(self) -> int:
        """Total number of entries in all rows."""
        _, steps, others = self.split(0, self.num_rows)
        return int(np.count_nonzero(steps.is_shown())) + len(others.token_ids)

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes, without texts."""
        part = self.cut(range(self.num_rows))  # whose optional columns have one value per position
        columns = [part.ids, part.logprobs, part.ranks, part.ends, part.is_none, part.kept_ids]
        columns += [*part.extra_columns.values(), *([] if part.kept_ends is None else [part.kept_ends])]
        return sum(column.nbytes for column in columns) + (
            0 if part.given_rows is None else part.given_rows.nbytes
        )

    # -- slicing and serializing -------------------------------------------------------------------------

    def cut(self, places: range) -> Rows:
        """Select rows; consecutive rows are not copied."""
        part, is_run = Rows(self.info), places.step == 1 or not places
        low = places.start if is_run else min(places)
        high = low + len(places) if is_run else max(places) + 1
        extras, given, kept = self.extras(low, high), self.given(low, high), self.kept(low, high)
        if is_run:
            part.share(self, low, high)
            if extras or given is not None or kept is not None:
                part.set_beside(extras, given, kept)
            return part
        rows = np.array(places) - low
        num_none, steps, others = self.split(low, high)
        if num_none or others.num_rows:
            part.append_entries(self.entries(low, high).take(rows))
        else:
            part.append_steps(steps.take(rows))
        if given is not None:
            given = given.cut(range(places.start - low, places.stop - low, places.step))
        if kept is not None:
            offsets, picked = spans(kept.offsets[:-1][rows], np.diff(kept.offsets)[rows])
            kept = IdLists(offsets, kept.token_ids[picked])
        part.set_beside({name: values[rows] for name, values in extras.items()}, given, kept)
        return part

    def set_beside(self, extras: Mapping[str, Array], given: Rows | None, kept: IdLists | None) -> None:
        """Set the optional data, which has one value or list per position, without copying it."""
        self.extra_columns = {name: Column("f", [values]) for name, values in extras.items()}
        self.given_rows = given
        if kept is not None:
            self.kept_ends = Column("I", [kept.offsets[1:]])
            self.kept_ids = Column("I", [kept.token_ids])

    def share(self, other: Rows, start: int, stop: int) -> None:
        """Become rows [start, stop) of another record, sharing its memory, without its optional data."""
        steps, others, cells, ranks = other.spans_of(start, stop)
        self.num_rows, self.num_steps = stop - start, len(steps)
        self.num_none = self.num_rows - len(steps) - len(others)
        self.width, self.repeats_chosen = other.width, other.repeats_chosen
        self.ids = other.ids.cut(cells.start, cells.stop)
        self.logprobs = other.logprobs.cut(cells.start, cells.stop)
        self.ranks = other.ranks.cut(ranks.start, ranks.stop)
        self.texts = other.texts and other.texts[cells]
        if others:
            ends = other.ends.read(others.start, others.stop)
            self.ends.append(ends - ends.dtype.type(other.end_of(others.start)))
            self.is_none = other.is_none.cut(others.start, others.stop)

    def state(self, max_none: int) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return scalars and columns from which `from_state` restores the rows, without optional data.

        If more than `max_none` leading positions have no prediction, all positions are stored as `Entries`.
        """
        if self.num_none > max_none:
            part = Rows()
            part.append_entries(self.entries(0, self.num_rows))
            return part.state(max_none)
        _, others, cells, ranks = self.spans_of(0, self.num_rows)
        scalars: dict[str, Any] = {
            "num_rows": self.num_rows,
            "num_none": self.num_none,
            "k": self.width - 1 if self.num_steps else 0,
            "repeats_chosen": self.repeats_chosen,
        }
        columns = {
            "token_ids": self.ids.read(0, cells.stop),
            "logprobs": self.logprobs.read(0, cells.stop),
            "ranks": self.ranks.read(0, ranks.stop),
        }
        if others:
            columns["ends"] = self.ends.read(0, others.stop)
            columns["is_none"] = self.is_none.read(0, others.stop)
        if self.texts is not None:
            code_of = {text: code for code, text in enumerate(dict.fromkeys(self.texts))}
            scalars["texts"] = [*code_of]
            columns["texts"] = pack_integers(np.array([code_of[text] for text in self.texts], np.int64))
        return scalars, columns

    @classmethod
    def from_state(cls, scalars: dict[str, Any], columns: dict[str, Array]) -> Rows:
        """Restore rows from the result of `state`, without copying columns."""
        rows = cls()
        ends = columns.get("ends", np.empty(0, np.uint16))
        rows.num_rows, rows.num_none = scalars["num_rows"], scalars["num_none"]
        rows.num_steps = rows.num_rows - rows.num_none - len(ends)
        rows.width, rows.repeats_chosen = scalars["k"] + 1, scalars["repeats_chosen"]
        rows.ids = Column("I", [columns["token_ids"]])
        rows.logprobs = Column("d", [columns["logprobs"]])
        rows.ranks = Column("I", [columns["ranks"]])
        rows.ends = Column("I", [ends])
        rows.is_none = Column("B", [columns.get("is_none", np.empty(0, np.bool_))])
        if "texts" in columns:
            rows.texts = [scalars["texts"][code] for code in columns["texts"].tolist()]
        return rows


def _check_offsets(name: str, offsets: Array, num_rows: int) -> None:
    if offsets.shape != (num_rows + 1,):
        raise ParameterError(name, f"has {len(offsets)} offsets for {num_rows} positions; give n + 1 offsets")
