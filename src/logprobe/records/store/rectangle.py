"""Rows of one width as their steps give them: the chosen token, the k best, and the chosen token's rank.

A row costs its k + 1 entries and a rank; a chosen token that is among the k best is hidden there on reading.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.store.columns import (
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    check_not_negative,
    float_column,
    logs_of_rest,
    narrowest_id_dtype,
)
from logprobe.records.store.entries import Entries, RowLists, TopLists

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from logprobe.records.store.columns import Array

Block: TypeAlias = "tuple[Array, ...]"
"""Ids and logprobs (n, width) and ranks (n,); a plain tuple, which the garbage collector leaves alone."""

MAX_WIDTH: Final = 65  # up to here the last block is one that single rows are quick to write to
FLOAT32: Final = np.dtype(np.float32)
BYTE_ORDER: Final = sys.byteorder
_INTEGERS: Final = {np.dtype(np.int32), np.dtype(np.int64)}


class StepRows(NamedTuple):
    """Rows of a step: column 0 is the chosen token, then the k best."""

    token_ids: Array  # (n, k + 1) integers >= 0
    logprobs: Array  # (n, k + 1) float32 or float64, nats
    ranks: Array  # (n,) integers, of the chosen token

    @classmethod
    def of(cls, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, ranks: npt.ArrayLike) -> StepRows:
        """A step's arrays, checked, logprobs as float32 where that is exact.

        Raises:
            ParameterError: shapes that do not agree, ids or ranks that are no integers or negative, +inf.
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
                raise ParameterError(name, f"{values.dtype} values where integers belong")
        check_not_negative(token_ids=rows.token_ids, ranks=rows.ranks)
        return rows._replace(logprobs=float_column(rows.logprobs))

    def repeats(self) -> Array:
        """Where the k best hold the chosen token, (n, k) bool."""
        is_repeat: Array = self.token_ids[:, 1:] == self.token_ids[:, :1]
        return is_repeat

    def entries(self, *, repeats_chosen: bool) -> Entries:
        """The same rows as entries; `repeats_chosen` keeps a chosen token that is among the k best twice."""
        n, width = self.token_ids.shape
        is_shown = np.ones((n, width), np.bool_)
        if not repeats_chosen:
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


class OpenBlock(NamedTuple):
    """What a row must be to be put into the last block as the bytes of its ids, logprobs and rank."""

    memory: bytearray
    row_bytes: int
    start: int  # first row
    stop: int  # one past the last row that there is room for
    shape: tuple[int, int] | None  # of the ids and logprobs of one row
    id_type: np.dtype[Any] | None
    rank_type: np.dtype[Any] | None
    signs: int  # of a row's bytes as one number, the bits that are signs
    expected: int  # and how they usually are: no id is negative, every logprob is


CLOSED: Final = OpenBlock(bytearray(), 0, 0, 0, None, None, None, 0, 0)


class Rectangle:
    """Rows in blocks that never move, each in the narrowest types that hold it.

    Blocks double from 1 KiB to 64 KiB: a view that a reader holds stays valid. The last block of narrow rows
    is open: it holds the bytes of a step's arrays as they came, row after row, and is made narrow once full.
    `repeats_chosen` says whether a chosen token that is among the k best is read twice, as `append_fast`
    takes it, or once.
    """

    __slots__ = (
        "_before",
        "_blocks",
        "_capacity",
        "_starts",
        "num_rows",
        "open",
        "repeats_chosen",
        "width",
    )

    def __init__(self, width: int, *, repeats_chosen: bool) -> None:
        self.width, self.repeats_chosen = width, repeats_chosen
        self._blocks: list[Block] = []
        self._starts: list[int] = []  # first row of each block
        self._before: list[int] = [0]  # entries before each of the first blocks, counted when first asked for
        self._capacity = 0  # rows that the blocks have room for
        self.open = CLOSED  # of the last block
        self.num_rows = 0  # published last: a reader that sees a row finds all of it

    @classmethod
    def of(cls, rows: StepRows, *, repeats_chosen: bool) -> Rectangle:
        """Wrap arrays without a copy."""
        part = cls(rows.token_ids.shape[1], repeats_chosen=repeats_chosen)
        part._add_block(tuple(rows), 0)
        part.num_rows = len(rows.ranks)
        return part

    @property
    def nbytes(self) -> int:
        """Bytes of the values held, those of the last block as it will be."""
        parts = [_narrow(part) for part in self._parts(0, self.num_rows)]
        return sum(int(column.nbytes) for part in parts for column in part)

    @property
    def num_entries(self) -> int:
        """Entries of all rows."""
        return self.first_entry(self.num_rows)

    # -- writing -----------------------------------------------------------------------------------------

    def append(self, rows: StepRows) -> None:
        """Add rows of this width with ids and ranks >= 0 and float32 logprobs."""
        done, count = 0, len(rows.ranks)
        types = [narrowest_id_dtype(int(column.max(initial=0))) for column in (rows.token_ids, rows.ranks)]
        while done < count:
            (ids, logprobs, ranks), first = self._room(types, rows, count - done)
            new = slice(done, done + len(ranks) - first)
            place = slice(first, first + len(rows.ranks[new]))
            ids[place], ranks[place] = rows.token_ids[new], rows.ranks[new]
            logprobs[place] = rows.logprobs[new]
            if self.open is CLOSED:
                logprobs[place] += np.float32(0)  # -0.0 becomes 0.0
            done += place.stop - first
            self.num_rows += place.stop - first

    def _room(self, types: list[np.dtype[Any]], rows: StepRows, count: int) -> tuple[Block, int]:
        """A block that holds integers of these types, and its first free row; a new one fits `count`."""
        at = self.num_rows
        if at < self._capacity:
            ids, _, ranks = block = self._blocks[-1]
            if [np.promote_types(*pair) for pair in zip(types, (ids.dtype, ranks.dtype), strict=True)] == [
                ids.dtype,
                ranks.dtype,
            ]:
                return block, at - self._starts[-1]
        id_type, rank_type = types
        row_bytes = self.width * (id_type.itemsize + 4) + rank_type.itemsize
        least, most = max(MIN_BLOCK_BYTES // row_bytes, 1), max(MAX_BLOCK_BYTES // row_bytes, 1)
        length = min(max(at, count, least), most)
        if self.width <= MAX_WIDTH and count < length:
            given = zip(types, (rows.token_ids.dtype, rows.ranks.dtype), strict=True)
            own = [has if has in _INTEGERS else np.promote_types(needed, np.int32) for needed, has in given]
            self._add_open(length, *own)
        else:
            shape = (length, self.width)
            block = np.empty(shape, id_type), np.empty(shape, np.float32), np.empty(length, rank_type)
            self._add_block(block, at)
        return self._blocks[-1], 0

    def _add_open(self, length: int, id_type: np.dtype[Any], rank_type: np.dtype[Any]) -> None:
        row_type = np.dtype(
            [("ids", id_type, (self.width,)), ("logprobs", FLOAT32, (self.width,)), ("rank", rank_type)]
        )
        memory = bytearray(length * row_type.itemsize)
        rows = np.frombuffer(memory, row_type)
        start, signs = self.num_rows, np.zeros(1, row_type)
        signs["logprobs"] = -0.0
        expected = int.from_bytes(signs.tobytes(), BYTE_ORDER)
        signs["ids"], signs["rank"] = np.iinfo(id_type).min, np.iinfo(rank_type).min
        mask = int.from_bytes(signs.tobytes(), BYTE_ORDER)
        self._add_block((rows["ids"], rows["logprobs"], rows["rank"]), start)
        self.open = OpenBlock(
            memory,
            row_type.itemsize,
            start,
            self._capacity,
            (1, self.width),
            id_type,
            rank_type,
            mask,
            expected,
        )

    def _add_block(self, block: Block, start: int) -> None:
        if self.open is not CLOSED:
            (part,) = self._parts(self._starts[-1], start)
            self._blocks[-1], self.open = tuple(_narrow(part)), CLOSED
        # The block before its start: a reader that finds the start also finds the block.
        self._blocks.append(block)
        self._starts.append(start)
        self._capacity = start + len(block[2])

    # -- reading -----------------------------------------------------------------------------------------

    def _parts(self, start: int, stop: int) -> Iterator[StepRows]:
        """Rows [start, stop) as views, one a block."""
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            first, last = self._starts[number], stop
            if number + 1 < len(self._starts):  # a block may end before its room does
                last = min(stop, self._starts[number + 1])
            ids, logprobs, ranks = (column[start - first : last - first] for column in self._blocks[number])
            # The columns of an open block lie apart, and may hold -0.0, which becomes 0.0.
            yield StepRows(
                ids, logprobs if logprobs.strides[0] == 4 * self.width else logprobs + np.float32(0), ranks
            )
            start, number = last, number + 1

    def rows(self, start: int, stop: int) -> StepRows:
        """Rows [start, stop): views where they lie in one block, else copies."""
        parts = [*self._parts(start, stop)]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            none = np.empty((0, self.width), np.uint16)
            return StepRows(none, none.astype(np.float32), none[:, 0])
        return StepRows(*map(np.concatenate, zip(*parts, strict=True)))

    def narrow_rows(self, count: int) -> StepRows:
        """The first rows, in the narrowest types that hold them."""
        return _narrow(self.rows(0, count))

    def _lists(self, row: int) -> tuple[list[int], list[float], int]:
        number = bisect_right(self._starts, row) - 1
        ids, logprobs, ranks = self._blocks[number]
        at = row - self._starts[number]
        # -0.0, which an open block may hold, becomes 0.0
        return ids[at].tolist(), (logprobs[at] + np.float32(0)).tolist(), int(ranks[at])

    def row(self, row: int) -> RowLists:
        """One row as Python values."""
        ids, logprobs, rank = self._lists(row)
        ranks = [rank, *range(1, self.width)]
        if not self.repeats_chosen:
            chosen_id = ids[0]
            while ids.count(chosen_id) > 1:
                place = ids.index(chosen_id, 1)
                del ids[place], logprobs[place], ranks[place]
        return RowLists(ids, logprobs, ranks)

    def top_lists(self, row: int) -> TopLists:
        """The chosen token and the k best of one row as Python values."""
        (chosen_id, *ids), (logprob, *logprobs), _ = self._lists(row)
        return TopLists(chosen_id, logprob, ids, logprobs)

    def entries(self, start: int, stop: int) -> Entries:
        """The public columns of rows [start, stop)."""
        return self.rows(start, stop).entries(repeats_chosen=self.repeats_chosen)

    def chosen_entries(self, start: int, stop: int) -> Entries:
        """The chosen token of each row of [start, stop)."""
        ids, logprobs, ranks = self.rows(start, stop)
        return Entries(  # copies: what a caller writes there is no record's
            offsets=np.arange(len(ranks) + 1),
            token_ids=ids[:, 0].copy(),
            logprobs=logprobs[:, 0].copy(),
            ranks=ranks.copy(),
        )

    def top_entries(self, start: int, stop: int) -> Entries:
        """The k best of each row of [start, stop), by rank."""
        ids, logprobs, ranks = self.rows(start, stop)
        k = self.width - 1
        return Entries(
            offsets=np.arange(len(ranks) + 1) * k,
            token_ids=ids[:, 1:].flatten(),
            logprobs=logprobs[:, 1:].flatten(),
            ranks=np.tile(np.arange(1, k + 1), len(ranks)),
        )

    def other_logprobs(self, start: int, stop: int) -> Array:
        """Log of the mass outside the tokens that each row lists, (n,) float32, nats."""
        rows = self.rows(start, stop)
        return logs_of_rest(np.column_stack([rows.logprobs[:, 1:], _alone(rows)]))

    def outside_top_logprobs(self, start: int, stop: int) -> Array:
        """Log of the mass outside the k best of each row, (n,) float32, nats."""
        rows = self.rows(start, stop)
        # Where rounding leaves the k best all of the mass, there is still that of a chosen token outside.
        return np.maximum(logs_of_rest(rows.logprobs[:, 1:]), _alone(rows))

    def widths(self, start: int, stop: int) -> Array:
        """Entries of each row of [start, stop), (n,) int64."""
        widths = np.full(stop - start, self.width)
        if not self.repeats_chosen and self.width > 1:
            widths -= np.count_nonzero(self.rows(start, stop).repeats(), axis=1)
        return widths

    def first_entry(self, row: int) -> int:
        """Number of entries before a row."""
        if self.repeats_chosen or self.width == 1 or not row:
            return row * self.width
        number = bisect_right(self._starts, row) - 1
        return self._entries_before(number)[number] + int(self.widths(self._starts[number], row).sum())

    def _entries_before(self, number: int) -> list[int]:
        """Entries before each of the first blocks, up to block `number` at least.

        Counted by whichever reader asks first. Another one may publish a shorter list meanwhile, so that a
        reader goes by the list that it was given.
        """
        before = self._before
        if number >= len(before):
            before = before.copy()
            for start, stop in pairwise(self._starts[len(before) - 1 : number + 1]):
                before.append(before[-1] + int(self.widths(start, stop).sum()))
            self._before = before
        return before

    # -- cutting -----------------------------------------------------------------------------------------

    def view(self, start: int, stop: int) -> Rectangle:
        """Rows [start, stop) sharing this memory."""
        part = Rectangle(self.width, repeats_chosen=self.repeats_chosen)
        for rows in self._parts(start, stop):
            part._add_block(tuple(rows), part.num_rows)
            part.num_rows += len(rows.ranks)
        return part


def _alone(rows: StepRows) -> Array:
    """Log-probability of each chosen token that is none of the k best, (n,) float32, nats; -inf: it is."""
    alone: Array = np.where(rows.repeats().any(axis=1), np.float32(-np.inf), rows.logprobs[:, 0])
    return alone


def _narrow(rows: StepRows) -> StepRows:
    """The same rows in the narrowest types that hold them; those that are narrow are not copied."""
    ids, ranks = (
        column.astype(narrowest_id_dtype(int(column.max(initial=0))), copy=False)
        for column in (rows.token_ids, rows.ranks)
    )
    return StepRows(
        np.ascontiguousarray(ids), np.ascontiguousarray(rows.logprobs), np.ascontiguousarray(ranks)
    )
