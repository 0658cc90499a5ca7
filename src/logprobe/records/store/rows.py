"""Rows of one record: fixed-width blocks, ragged blocks with offsets, and a write buffer for the last rows.

A block never changes. A small block is merged with the next block if both are of the same kind.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate, groupby, islice
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from logprobe.records.store.columns import narrowed
from logprobe.records.store.entries import Entries, RowLists
from logprobe.records.store.inputs import as_given_steps, as_step_rows, row_from_columns
from logprobe.records.store.steps import Steps, row_lists, top_lists
from logprobe.records.store.texts import Texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logprobe.records.store.columns import Array
    from logprobe.records.store.entries import TopLists

Block: TypeAlias = Steps | Entries
Held: TypeAlias = "tuple[tuple[Block, ...], tuple[int, ...], Waiting | None]"
"""The blocks, the index of the first row in each block and in the write buffer, and the write buffer."""

MAX_WAITING: Final = 4096  # entries in the write buffer
MAX_WAITING_WIDTH: Final = 65  # entries per row in the write buffer; wider rows are faster as arrays
MIN_ROWS: Final = 16  # a block with at most this many rows is merged with any next block of its kind
MAX_BLOCKS: Final = 64  # above this, small blocks of different kinds are merged too, as `Entries`
MAX_BLOCK_BYTES: Final = 1 << 16  # a larger block is not merged any more
FLOAT32: Final = np.dtype(np.float32)
INTEGERS: Final = {np.dtype(np.int32), np.dtype(np.int64)}
_ndarray, _ONE = np.ndarray, (1,)  # bound once: `append_one` runs for every token


class Rows:
    """Rows of one record and the texts given with them.

    Single rows are buffered in `array.array`s, because NumPy takes as long for one row as for a hundred.
    One thread may append while others read: a reader loads `_held` once, and a writer sets `num_rows` last.
    """

    __slots__ = ("_held", "_waiting", "num_rows", "texts")

    def __init__(self, blocks: Sequence[Block] = (), texts: Texts | None = None) -> None:
        starts = (0, *accumulate(block.num_rows for block in blocks))
        self._held: Held = tuple(blocks), starts, None
        self._waiting: Waiting | None = None  # used by the writer only
        self.texts = texts  # None if no text was appended so far
        self.num_rows = starts[-1]

    # -- growing -----------------------------------------------------------------------------------------

    def append_none(self, count: int = 1) -> None:
        """Add `count` positions without a prediction."""
        if count:
            self._add(Entries.none(count))

    def append_one(self, token_ids: Any, logprobs: Any, ranks: Any) -> bool:
        """Add one row if it has the shape and types of the previous row; else return False."""
        waiting = self._waiting
        if not (
            waiting is not None
            and self.num_rows < waiting.stop
            and self.texts is None
            and type(token_ids) is type(logprobs) is type(ranks) is _ndarray
            and token_ids.shape == waiting.shape == logprobs.shape
            and ranks.shape == _ONE
            and token_ids.dtype is waiting.id_type
            and ranks.dtype is waiting.rank_type
            and logprobs.dtype is FLOAT32
        ):
            return False
        [ids], [values], [rank] = token_ids.tolist(), logprobs.tolist(), ranks.tolist()
        if inf in values or not waiting.add(ids, values, rank):
            return False
        self.num_rows += 1
        return True

    def append_step(self, steps: Steps, *, texts: list[str | None] | None = None) -> None:
        """Add rows validated by `Steps.of`; `texts` has one text for each entry in `steps.entries()`."""
        if steps.logprobs.dtype != np.float32:
            self.append_entries(replace(steps.entries(), texts=texts))
            return
        if texts is not None or self.texts is not None:
            self._write_texts(replace(steps.entries(), texts=texts))
        is_single = steps.num_rows == 1 and steps.width <= MAX_WAITING_WIDTH and not steps.repeats_chosen
        if not (is_single and self._wait_for(steps)):
            self._add(steps.packed())

    def _wait_for(self, steps: Steps) -> bool:
        """Buffer one row; return False if its ids or ranks do not fit the buffer's types."""
        waiting = self._waiting
        if waiting is None or waiting.kind != steps.kind or self.num_rows >= waiting.stop:
            types = steps.token_ids.dtype, steps.ranks.dtype
            waiting = self._start_waiting(steps.width, *types)
        is_added = waiting.add(steps.token_ids[0].tolist(), steps.logprobs[0].tolist(), int(steps.ranks[0]))
        self.num_rows += is_added
        return is_added

    def append_position(self, row: RowLists, entries: Entries) -> None:
        """Add one row of distinct tokens; `entries` must be `row_entries(row)`."""
        blocks, _, waiting = self._held
        last = waiting if waiting is not None and waiting.num_rows else blocks[-1] if blocks else None
        k = None if last is None or last.kind is None else last.width - 1
        steps = as_step_rows(row, entries, k)
        if steps is None:
            self.append_entries(entries)
        else:
            self.append_step(steps, texts=row.texts)

    def append_entries(self, entries: Entries) -> None:
        """Add positions exactly as given."""
        if entries.texts is not None or self.texts is not None:
            self._write_texts(entries)
        self._add(entries.packed())

    def append_given(self, entries: Entries) -> None:
        """Add positions; if they have the form of `Steps`, they are stored as such, without offsets."""
        steps = as_given_steps(entries)
        if steps is None:
            self.append_entries(entries)
        else:
            self.append_step(steps, texts=entries.texts)

    def append_soon(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> RowLists | None:
        """Buffer one row exactly as given, or return the row for `append_entries` if it does not fit.

        Raises:
            ParameterError: a column yields too few values.
        """
        # Hot path: a list of the right length is not copied.
        ids = token_ids if type(token_ids) is list else [*token_ids]
        n = len(ids)
        values = logprobs if type(logprobs) is list and len(logprobs) == n else [*islice(logprobs, n)]
        of_rank, texts = [*islice(ranks, n)], [*islice(decoded_tokens, n)]
        waiting = self._waiting
        if waiting is None or waiting.width != n or waiting.shape or self.num_rows >= waiting.stop:
            waiting = self._start_waiting(n)
        if of_rank[1:] != waiting.order or inf in values or not len(values) == len(texts) == n:
            return row_from_columns(ids, values, of_rank, texts)
        if not n or not waiting.add(ids, values, of_rank[0]):
            return row_from_columns(ids, values, of_rank, texts)
        if self.texts is not None or texts != waiting.no_texts:
            known = self.texts or Texts()
            known.write(self.num_rows, ids, texts)
            self.texts = known
        self.num_rows += 1
        return None

    def extend(self, other: Rows) -> None:
        """Add the current rows of another record."""
        if other.texts is not None or self.texts is not None:
            self._write_texts(other.entries(0, other.num_rows))
        self._add(*other._runs(0, other.num_rows))

    def _start_waiting(self, width: int, *types: np.dtype[Any]) -> Waiting:
        self._add()
        blocks, starts, _ = self._held
        waiting = Waiting(width, starts[-1] + MAX_WAITING // max(width, 1) + 1, *types)
        self._held = (blocks, starts, waiting)
        self._waiting = waiting
        return waiting

    def _add(self, *new: Block) -> None:
        """Flush the buffer to a block, then add blocks."""
        blocks, starts, waiting = [*self._held[0]], [*self._held[1]], self._held[2]
        if waiting is not None and waiting.num_rows:
            new = (waiting.block(0, waiting.num_rows), *new)
        for added in new:
            block = added
            while (
                blocks
                and (blocks[-1].kind == block.kind or len(blocks) >= MAX_BLOCKS)
                and blocks[-1].num_rows <= max(block.num_rows, MIN_ROWS)
                and blocks[-1].nbytes <= MAX_BLOCK_BYTES
            ):
                block = _joined([blocks.pop(), block])
                starts.pop()
            blocks.append(block)
            starts.append(starts[-1] + block.num_rows)
        self._held, self._waiting = (tuple(blocks), tuple(starts), None), None
        self.num_rows = starts[-1]

    def _write_texts(self, entries: Entries) -> None:
        """Store the texts of positions that are about to be added."""
        known, bounds, ids = self.texts or Texts(), entries.offsets.tolist(), entries.token_ids.tolist()
        for row in range(entries.num_rows):
            place = slice(bounds[row], bounds[row + 1])
            known.write(self.num_rows + row, ids[place], entries.texts and entries.texts[place])
        self.texts = known

    # -- reading -----------------------------------------------------------------------------------------

    def _parts(self, start: int, stop: int) -> list[Block]:
        """Return rows [start, stop) as stored: as views of blocks and a copy of buffered rows."""
        blocks, starts, waiting = self._held
        number, found = bisect_right(starts, start) - 1, list[Block]()
        while start < stop:
            first = starts[number]
            if number == len(blocks):
                assert waiting is not None, "rows outside of all blocks are buffered"
                return [*found, waiting.block(start - first, stop - first)]
            last = min(stop, starts[number + 1])
            block = blocks[number]
            is_whole = last - start == block.num_rows
            found.append(block if is_whole else block.cut(slice(start - first, last - first)))
            start, number = last, number + 1
        return found

    def _runs(self, start: int, stop: int) -> list[Block]:
        """Return rows [start, stop) as blocks, with adjacent blocks of the same kind merged."""
        groups = groupby(self._parts(start, stop), key=lambda block: block.kind)
        return [_joined([*group]) for _, group in groups]

    def row(self, row: int) -> RowLists | None:
        """Return one row as Python values; None if the position has no prediction."""
        blocks, starts, waiting = self._held
        number = bisect_right(starts, row) - 1
        part = blocks[number] if number < len(blocks) else waiting
        assert part is not None, "rows that are in no block wait"
        lists, texts = part.row(row - starts[number]), self.texts
        if lists is None or texts is None:
            return lists
        return lists._replace(texts=texts.read(row, lists.token_ids))

    def top_lists(self, row: int) -> TopLists | None:
        """Return the chosen token and the k most likely tokens of one row; None if the row has no entries."""
        blocks, starts, waiting = self._held
        number = bisect_right(starts, row) - 1
        part = blocks[number] if number < len(blocks) else waiting
        assert part is not None, "rows that are in no block wait"
        return part.top_lists(row - starts[number])

    def entries(self, start: int, stop: int) -> Entries:
        """Return the entries of rows [start, stop)."""
        entries = self._entries(start, stop, lambda block: block.entries())
        if self.texts is None:
            return entries
        return replace(entries, texts=self.texts.read_rows(start, entries.offsets, entries.token_ids))

    def chosen_entries(self, start: int, stop: int) -> Entries:
        """Return the chosen token of each row in [start, stop) that has entries."""
        return self._entries(start, stop, lambda block: block.chosen_entries())

    def top_entries(self, start: int, stop: int) -> Entries:
        """Return the k most likely tokens of each row in [start, stop), by rank."""
        return self._entries(start, stop, lambda block: block.top_entries())

    def _entries(self, start: int, stop: int, read: Callable[[Block], Entries]) -> Entries:
        return Entries.joined([read(block) for block in self._runs(start, stop)])

    def other_logprobs(self, start: int, stop: int) -> Array:
        """Return the log of the probability outside each row's entries, (n,) float32 in nats.

        NaN for rows without a prediction.
        """
        return self._numbers(start, stop, lambda block: block.other_logprobs())

    def outside_top_logprobs(self, start: int, stop: int) -> Array:
        """Return the log of the probability outside each row's k most likely tokens, (n,) float32 in nats.

        NaN for rows without a prediction.
        """
        return self._numbers(start, stop, lambda block: block.outside_top_logprobs())

    def _numbers(self, start: int, stop: int, read: Callable[[Block], Array]) -> Array:
        return np.concatenate([np.empty(0, np.float32), *map(read, self._runs(start, stop))])

    @property
    def num_entries(self) -> int:
        """Total number of entries in all rows."""
        return sum(block.num_entries for block in self._parts(0, self.num_rows))

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes, without texts."""
        return sum(block.nbytes for block in self._parts(0, self.num_rows))

    # -- slicing and serializing -------------------------------------------------------------------------

    def cut(self, places: range) -> Rows:
        """Select rows; consecutive rows are not copied."""
        if places.step == 1 or not places:
            start, stop = places.start, places.start + len(places)
            return Rows(self._parts(start, stop), self.texts and self.texts.view(start, stop))
        low, high = sorted((places[0], places[-1]))
        rows, blocks, first = np.array(places) - low, list[Block](), 0
        for block in self._parts(low, high + 1):
            own = rows[(rows >= first) & (rows < first + block.num_rows)] - first
            blocks.append(block.cut(own))
            first += block.num_rows
        part = Rows(blocks if places.step > 0 else blocks[::-1])
        if self.texts is not None:
            texts = Rows(part._parts(0, part.num_rows))
            texts.num_rows = 0
            texts._write_texts(self.entries(low, high + 1).cut(rows))
            part.texts = texts.texts
        return part

    def layout(self, max_none: int | None = None) -> tuple[int, Steps, Entries | None]:
        """Split the rows into leading rows without a prediction, `Steps` of one kind, and all others.

        Return the number of leading rows, the `Steps` and the others. If there are more than `max_none`
        leading rows without a prediction, the number is 0 and these rows are among the others.
        """
        runs, num_none = self._runs(0, self.num_rows), 0
        if runs and isinstance(runs[0], Entries):
            num_none = int(np.argmin([*runs[0].none_flags(), False]))
            if max_none is not None and num_none > max_none:
                num_none = 0
            rest = runs[0].cut(slice(num_none, None))
            runs = [rest, *runs[1:]] if rest.num_rows else runs[1:]
        if runs and isinstance(runs[0], Steps):
            steps, *runs = runs
        else:
            none = np.empty((0, 1), np.uint16)
            steps = Steps(none, none.astype(np.float32), none[:, 0])
        assert isinstance(steps, Steps)
        return num_none, steps, Entries.joined([run.entries() for run in runs]) if runs else None

    def state(self, max_none: int) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return the result of `layout` as scalars and columns, from which `from_state` restores the rows."""
        num_none, steps, entries = self.layout(max_none)
        columns = {"token_ids": steps.token_ids, "logprobs": steps.logprobs, "ranks": steps.ranks}
        scalars: dict[str, Any] = {
            "num_none": num_none,
            "k": steps.width - 1,
            "repeats_chosen": steps.repeats_chosen,
            "num_rows": num_none + steps.num_rows,
        }
        if entries is not None:
            scalars["num_rows"] += entries.num_rows
            columns |= {
                "entry_ids": entries.token_ids,
                "entry_logprobs": entries.logprobs,
                "entry_ranks": entries.ranks,
                "ends": entries.offsets[1:],
                "is_none": entries.none_flags(),
            }
        if self.texts is not None:
            scalars["texts"], text_columns = self.texts.view(0, scalars["num_rows"]).state()
            columns |= text_columns
        return scalars, columns

    @classmethod
    def from_state(cls, scalars: dict[str, Any], columns: dict[str, Array]) -> Rows:
        """Restore rows from the result of `state`, without copying large arrays."""
        steps = Steps(columns["token_ids"], columns["logprobs"], columns["ranks"], scalars["repeats_chosen"])
        blocks: list[Block] = [Entries.none(scalars["num_none"]), steps]
        if "ends" in columns:
            blocks.append(
                Entries(
                    offsets=np.concatenate([np.zeros(1, np.int64), columns["ends"]]),
                    token_ids=columns["entry_ids"],
                    logprobs=columns["entry_logprobs"],
                    ranks=columns["entry_ranks"],
                    is_none=columns["is_none"],
                )
            )
        texts = Texts.from_state(scalars["texts"], columns) if "text_ids" in columns else None
        return cls([block for block in blocks if block.num_rows], texts)


def _joined(blocks: list[Block]) -> Block:
    """Merge blocks: `Steps` of one kind into `Steps`, others into `Entries`. A single block is not copied."""
    if len(blocks) == 1:
        return blocks[0]
    steps = [block for block in blocks if isinstance(block, Steps)]
    if len(steps) == len(blocks) and len({block.kind for block in blocks}) == 1:
        return Steps.joined(steps)
    return Entries.joined([block.entries() for block in blocks])


class Waiting:
    """Write buffer for rows of one width with ranks [r, 1, 2, ...]; `array.array` appends lists fast."""

    __slots__ = (
        "_add_ids",
        "_add_logprobs",
        "_add_rank",
        "_ids",
        "_logprobs",
        "_ranks",
        "id_type",
        "no_texts",
        "order",
        "rank_type",
        "shape",
        "stop",
        "width",
    )

    def __init__(self, width: int, stop: int, *types: np.dtype[Any]) -> None:
        """Create a buffer that is full at row `stop` of the record.

        `types` are the id and rank dtypes of an engine step's arrays; leave them out for rows from
        `append_fast`.
        """
        self.width = width
        self.stop = stop  # row number at which the buffer is full
        self.order, self.no_texts = [*range(1, width)], [None] * width
        self.shape = (1, width) if types else None
        self.id_type: np.dtype[Any] | None = None  # if None, `append_one` never applies
        self.rank_type: np.dtype[Any] | None = None
        if types and INTEGERS.issuperset(types):
            self.id_type, self.rank_type = types
        # Unsigned, so that appending a negative number raises OverflowError.
        self._ids, self._logprobs, self._ranks = array("I"), array("d"), array("I")
        self._add_ids, self._add_logprobs = self._ids.fromlist, self._logprobs.fromlist
        self._add_rank: Callable[[Any], None] = self._ranks.append

    @property
    def kind(self) -> tuple[int, bool]:
        """The `kind` of the block that the buffered rows will become."""
        return self.width, self.shape is None

    @property
    def num_rows(self) -> int:
        """Number of complete rows."""
        return len(self._ranks)

    def add(self, ids: list[int], logprobs: list[float], rank: Any) -> bool:
        """Add one row; return False for ids or ranks beyond uint32 and for values of a wrong type."""
        try:
            self._add_ids(ids)
            self._add_logprobs(logprobs)
            self._add_rank(rank)  # last, so that every counted row is complete
        except (TypeError, OverflowError):
            self._forget_unfinished()
            return False
        except BaseException:  # raised by the caller's number types, or an interrupt
            self._forget_unfinished()
            raise
        return True

    def _forget_unfinished(self) -> None:
        num_entries = self.num_rows * self.width
        del self._ids[num_entries:], self._logprobs[num_entries:]

    def row(self, row: int) -> RowLists:
        """Return one row as Python values."""
        return row_lists(*self._lists(row), self._ranks[row], repeats_chosen=self.shape is None)

    def top_lists(self, row: int) -> TopLists:
        """Return the chosen token and the k most likely tokens of one row as Python values."""
        return top_lists(*self._lists(row))

    def _lists(self, row: int) -> tuple[list[int], list[float]]:
        place = slice(row * self.width, (row + 1) * self.width)
        return self._ids[place].tolist(), [logprob + 0.0 for logprob in self._logprobs[place]]  # no -0.0

    def block(self, first: int, last: int) -> Block:
        """Return rows [first, last) as a block."""
        place, shape = slice(first * self.width, last * self.width), (last - first, self.width)
        ids = np.array(self._ids[place]).reshape(shape)
        logprobs = narrowed(np.array(self._logprobs[place])).reshape(shape)
        steps = Steps(ids, logprobs, np.array(self._ranks[first:last]), self.shape is None)
        return steps.packed() if logprobs.dtype == np.float32 else steps.entries().packed()
