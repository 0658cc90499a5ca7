"""The rows of one record: positions without any, then the steps' own rectangle, then whatever came by hand.

A step's rows take no offsets. From the first position on that is none (another width, ranks of its own,
a None after others) there are some; what came before stays as it is.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import islice
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from logprobe.records.store.columns import chunks, narrowed
from logprobe.records.store.entries import Entries, RowLists
from logprobe.records.store.inputs import as_step_rows, row_from_columns
from logprobe.records.store.ragged import NOTHING, Ragged
from logprobe.records.store.rectangle import BYTE_ORDER, FLOAT32, Rectangle, StepRows
from logprobe.records.store.texts import Texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from logprobe.records.store.columns import Array
    from logprobe.records.store.entries import TopLists

# Looked up once: `append_one` is called a token.
_ndarray, _from_bytes, _ONE = np.ndarray, int.from_bytes, (1,)
_INF: Final = np.float32(np.inf).tobytes()
MAX_WAITING: Final = 4096  # entries of `append_fast` that wait

Part: TypeAlias = Rectangle | Ragged


class Rows:
    """The one store: `num_none` positions, `rectangle`, `ragged`, in this order, and the texts given with it.

    Rows of `append_fast` wait until there are many or until somebody reads: numbers of Python's are quicker
    to convert together. Whoever packs them holds the lock; everything else is the one writer's.
    """

    __slots__ = ("_lock", "_open", "_waiting", "num_none", "num_rows", "ragged", "rectangle", "texts")

    def __init__(
        self,
        num_none: int = 0,
        rectangle: Rectangle | None = None,
        ragged: Ragged | None = None,
        texts: Texts | None = None,
    ) -> None:
        self.num_none = num_none
        self.rectangle = rectangle or Rectangle(1, repeats_chosen=False)
        self.ragged = ragged or NOTHING
        self.texts = texts  # None: no text was given so far
        self._waiting: _Waiting | None = None
        self._open: Rectangle | None = None  # the rectangle, while a step's row goes straight there
        self._lock = Lock()
        self.num_rows = self._num_packed()  # published last: a reader that sees a row finds all of it

    def _num_packed(self) -> int:
        return self.num_none + self.rectangle.num_rows + self.ragged.num_rows

    @property
    def is_regular(self) -> bool:
        """Whether every position behind the first None ones is a step's row, the chosen token shown once."""
        self._pack()
        return not self.ragged.num_rows and not self.rectangle.repeats_chosen

    @property
    def nbytes(self) -> int:
        """Bytes of the values held."""
        self._pack()
        return self.rectangle.nbytes + self.ragged.nbytes

    # -- growing -----------------------------------------------------------------------------------------

    def append_none(self, count: int = 1) -> None:
        """Add positions without entries that read as None."""
        if not count:
            return
        if self.num_none < self.num_rows:
            self.append_entries(Entries.none(count))
            return
        self.num_none += count
        self.num_rows += count

    def append_one(self, token_ids: Any, logprobs: Any, ranks: Any) -> bool:
        """`append_step` of one narrow row in about a microsecond; False where that should look."""
        rectangle = self._open
        if rectangle is None or not type(token_ids) is type(logprobs) is type(ranks) is _ndarray:
            return False
        memory, row_bytes, start, stop, shape, id_type, rank_type, mask, expected = rectangle.open
        at = rectangle.num_rows
        if not (
            at < stop
            and token_ids.shape == shape == logprobs.shape
            and ranks.shape == _ONE
            and token_ids.dtype is id_type
            and logprobs.dtype is FLOAT32
            and ranks.dtype is rank_type
        ):
            return False
        row = token_ids.tobytes() + logprobs.tobytes() + ranks.tobytes()
        signs = _from_bytes(row, BYTE_ORDER) & mask
        if signs != expected and (signs | expected != expected or _INF in row):
            return False
        first = (at - start) * row_bytes
        memory[first : first + row_bytes] = row
        rectangle.num_rows = at + 1
        self.num_rows += 1
        return True

    def append_step(
        self,
        rows: StepRows,
        *,
        repeats_chosen: bool = False,
        texts: list[str | None] | None = None,
    ) -> None:
        """Add a step's rows, as `StepRows.of` checks them; `texts` are of the entries that are shown."""
        self._pack(is_last=True)
        self._add_step(rows, repeats_chosen=repeats_chosen, texts=texts)
        is_plain = self.texts is None and not (self.ragged.num_rows or self.rectangle.repeats_chosen)
        self._open = self.rectangle if is_plain else None
        self.num_rows = self._num_packed()

    def append_position(self, row: RowLists, entries: Entries) -> None:
        """Add one row of different tokens, whose `row_entries` these are."""
        self._pack(is_last=True)
        rectangle = self.rectangle
        k = rectangle.width - 1 if rectangle.num_rows else None
        rows = None if self.ragged.num_rows else as_step_rows(row, entries, k)
        if rows is None:
            self.append_entries(entries)
        else:
            self.append_step(rows, texts=row.texts)

    def append_entries(self, entries: Entries) -> None:
        """Add a run of rows exactly as given; None ones at the front of a record take no bytes."""
        self._pack(is_last=True)
        self._open = None
        if entries.is_none is not None and self.num_none == self.num_rows:
            num_rows = len(entries.is_none)
            num_none = int(np.argmin([*entries.is_none.tolist(), False]))
            self.num_none += num_none
            entries = entries.take(np.arange(num_none, num_rows))
        self._add_entries(entries)
        self.num_rows = self._num_packed()

    def append_given(self, entries: Entries) -> None:
        """`append_entries` of rows that take no offsets where they are a step's."""
        rows = _regular(entries)
        if rows is None:
            self.append_entries(entries)
        else:
            self.append_step(rows, repeats_chosen=True, texts=entries.texts)

    def extend(self, other: Rows) -> None:
        """Add the rows that another record holds now."""
        for start, stop in chunks(other.num_rows):
            other_rectangle, num_none = other.rectangle, min(max(other.num_none - start, 0), stop - start)
            self.append_none(num_none)
            for part, first, last in other._parts(start, stop):
                texts = other._texts_of(part, first, last)
                if part is other_rectangle:
                    repeats_chosen = other_rectangle.repeats_chosen
                    self.append_step(
                        other_rectangle.rows(first, last), repeats_chosen=repeats_chosen, texts=texts
                    )
                else:
                    self.append_entries(replace(part.entries(first, last), texts=texts))

    def _add_step(self, rows: StepRows, *, repeats_chosen: bool, texts: list[str | None] | None) -> None:
        width = rows.token_ids.shape[1]
        if not (self.rectangle.num_rows or self.ragged.num_rows):
            self.rectangle = Rectangle(width, repeats_chosen=repeats_chosen)
        rectangle = self.rectangle
        is_like = (rectangle.width, rectangle.repeats_chosen) == (width, repeats_chosen)
        if self.ragged.num_rows or not is_like or rows.logprobs.dtype != np.float32:
            self._add_entries(replace(rows.entries(repeats_chosen=repeats_chosen), texts=texts))
            return
        if texts is not None or self.texts is not None:
            self._write_texts(rows.entries(repeats_chosen=repeats_chosen).token_ids, texts)
        rectangle.append(rows)

    def _add_entries(self, entries: Entries) -> None:
        if entries.texts is not None or self.texts is not None:
            self._write_texts(entries.token_ids, entries.texts)
        if self.ragged is NOTHING:
            self.ragged = Ragged()
        self.ragged.append(entries)

    def _write_texts(self, token_ids: Array, texts: list[str | None] | None) -> None:
        """Note the texts of entries that are about to be added."""
        known = self.texts or Texts()
        known.write(self.rectangle.num_entries + self.ragged.num_entries, token_ids.tolist(), texts)
        self.texts = known

    # -- rows that wait ----------------------------------------------------------------------------------

    def append_soon(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> RowLists | None:
        """Let one row wait, exactly as given; what is unusual is given back for `append_entries`.

        Raises:
            ParameterError: a column yields too few values.
        """
        # Each step counts here: a list of the right length is not copied.
        ids = token_ids if type(token_ids) is list else [*token_ids]
        n = len(ids)
        values = logprobs if type(logprobs) is list and len(logprobs) == n else [*islice(logprobs, n)]
        of_rank, texts = [*islice(ranks, n)], [*islice(decoded_tokens, n)]
        waiting = self._waiting
        if waiting is None or waiting.width != n or self.num_rows >= waiting.end:
            waiting = self._wait(n)
        if of_rank[1:] != waiting.order or inf in values or len(values) != n:
            return row_from_columns(ids, values, of_rank, texts)
        try:
            waiting.add_ids(ids)
            waiting.add_logprobs(values)
            if texts != waiting.no_texts or waiting.texts is not None:
                waiting.add_texts(texts)
            waiting.add_rank(of_rank[0])  # last: a reader that packs finds all of a row
        except (TypeError, OverflowError, IndexError):  # not all unsigned 32-bit integers and numbers
            waiting.forget_unfinished()
            return row_from_columns(ids, values, of_rank, texts)
        except BaseException:  # of the caller's numbers, or an interrupt
            waiting.forget_unfinished()
            raise
        self.num_rows += 1
        return None

    def _wait(self, width: int) -> _Waiting:
        self._pack(is_last=True)
        self._open = None
        self._waiting = waiting = _Waiting(width, self.num_rows + MAX_WAITING // max(width, 1) + 1)
        return waiting

    def _pack(self, *, is_last: bool = False) -> None:
        """Move what waits to where it stays; `is_last`: the writer adds other rows behind."""
        waiting = self._waiting
        if waiting is None or (not is_last and waiting.num_taken == len(waiting.ranks)):
            return
        with self._lock:
            waiting = self._waiting
            if waiting is not None:
                rows, texts = waiting.take()
                if len(rows.ranks):
                    self._add_step(rows, repeats_chosen=True, texts=texts)
                    # Behind the rows: a reader that sees the number takes no lock and finds them.
                    waiting.num_taken += len(rows.ranks)
                if is_last:
                    self._waiting = None

    # -- reading -----------------------------------------------------------------------------------------

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """What holds the rows [start, stop) behind the first None ones, with its own numbers of them."""
        self._pack()
        base = self.num_none
        for part in (self.rectangle, self.ragged):
            num_rows = part.num_rows
            first, last = max(start - base, 0), min(stop - base, num_rows)
            if first < last:
                yield part, first, last
            base += num_rows

    def _joined(self, start: int, stop: int, read: Callable[[Part, int, int], Entries]) -> Entries:
        num_none = min(max(self.num_none - start, 0), stop - start)
        runs = [read(part, first, last) for part, first, last in self._parts(start, stop)]
        return Entries.joined([Entries.none(num_none), *runs] if num_none else runs)

    def _place(self, row: int) -> tuple[Part, int] | None:
        """What holds one row, and its number there; None for one of the first None ones."""
        self._pack()
        at, rectangle = row - self.num_none, self.rectangle
        if at < 0:
            return None
        return (rectangle, at) if at < rectangle.num_rows else (self.ragged, at - rectangle.num_rows)

    def row(self, row: int) -> RowLists | None:
        """One row as Python values; None for a None row."""
        place = self._place(row)
        lists, texts = None if place is None else place[0].row(place[1]), self.texts
        if lists is None or texts is None:
            return lists
        return lists._replace(texts=texts.read(self.first_entry(row), lists.token_ids))

    def top_lists(self, row: int) -> TopLists | None:
        """The chosen token and the k best of one row as Python values; None where it has no entries."""
        place = self._place(row)
        return None if place is None else place[0].top_lists(place[1])

    def entries(self, start: int, stop: int) -> Entries:
        """The public columns of rows [start, stop)."""
        entries, texts = (
            self._joined(start, stop, lambda part, first, last: part.entries(first, last)),
            self.texts,
        )
        if texts is None:
            return entries
        return replace(entries, texts=texts.read(self.first_entry(start), entries.token_ids.tolist()))

    def _texts_of(self, part: Part, first: int, last: int) -> list[str | None] | None:
        if self.texts is None:
            return None
        before = 0 if part is self.rectangle else self.rectangle.num_entries
        ids = part.entries(first, last).token_ids.tolist()
        return self.texts.read(before + part.first_entry(first), ids)

    def chosen_entries(self, start: int, stop: int) -> Entries:
        """The chosen token of each row of [start, stop) that has entries."""
        return self._joined(start, stop, lambda part, first, last: part.chosen_entries(first, last))

    def top_entries(self, start: int, stop: int) -> Entries:
        """The k best of each row of [start, stop), by rank."""
        return self._joined(start, stop, lambda part, first, last: part.top_entries(first, last))

    def other_logprobs(self, start: int, stop: int) -> Array:
        """Log of the mass outside the tokens that each row lists, (n,) float32, nats; NaN for a None row."""
        return self._numbers(start, stop, lambda part, first, last: part.other_logprobs(first, last))

    def outside_top_logprobs(self, start: int, stop: int) -> Array:
        """Log of the mass outside the k best of each row, (n,) float32, nats; NaN for a None row."""
        return self._numbers(start, stop, lambda part, first, last: part.outside_top_logprobs(first, last))

    def _numbers(self, start: int, stop: int, read: Callable[[Part, int, int], Array]) -> Array:
        """One number a row, (n,) float32; NaN for a None row."""
        num_none = min(max(self.num_none - start, 0), stop - start)
        runs = [read(part, first, last) for part, first, last in self._parts(start, stop)]
        return np.concatenate([np.full(num_none, np.nan, np.float32), *runs])

    def first_entry(self, row: int) -> int:
        """Number of entries before a row."""
        self._pack()
        at, num_rows = max(row - self.num_none, 0), self.rectangle.num_rows
        if at <= num_rows:
            return self.rectangle.first_entry(at)
        return self.rectangle.num_entries + self.ragged.first_entry(at - num_rows)

    # -- cutting and carrying ----------------------------------------------------------------------------

    def cut(self, places: range) -> Rows:
        """The rows at `places`; without a copy where they are consecutive."""
        if places.step == 1 or not places:
            return self._view(places.start, places.start + len(places))
        rows = np.arange(places.start, places.stop, places.step)
        low, high = int(rows.min()), int(rows.max()) + 1
        part, num_none = Rows(), int(np.count_nonzero(rows < self.num_none))
        is_none_first = (rows[num_none:] >= self.num_none).all()
        parts = [*self._parts(low, high)]
        if not is_none_first or any(held is self.ragged for held, _, _ in parts):
            part.append_entries(self.entries(low, high).take(rows - low))
            return part
        part.append_none(num_none)
        for _, first, last in parts:
            picked = rows[num_none:] - self.num_none - first
            kept = StepRows(*(column[picked] for column in self.rectangle.rows(first, last)))
            texts = None if self.texts is None else self.entries(low, high).take(rows - low).texts
            part.append_step(kept, repeats_chosen=self.rectangle.repeats_chosen, texts=texts)
        return part

    def _view(self, start: int, stop: int) -> Rows:
        self._pack()
        num_none, texts = min(max(self.num_none - start, 0), stop - start), self.texts
        if texts is not None:
            texts = texts.view(self.first_entry(start), self.first_entry(stop))
        at = [min(max(row - self.num_none, 0), self.rectangle.num_rows) for row in (start, stop)]
        base = self.num_none + self.rectangle.num_rows
        beyond = [max(row - base, 0) for row in (start, stop)]
        ragged = self.ragged.view(*beyond) if self.ragged.num_rows else None
        return Rows(num_none, self.rectangle.view(*at), ragged, texts)

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Scalars and columns from which `from_state` builds the same rows."""
        self._pack()
        rectangle, num_rows = self.rectangle, self.rectangle.num_rows
        scalars: dict[str, Any] = {
            "num_none": self.num_none,
            "k": rectangle.width - 1,
            "repeats_chosen": rectangle.repeats_chosen,
        }
        columns: dict[str, Array] = rectangle.narrow_rows(num_rows)._asdict()
        if self.ragged.num_rows:
            columns |= self.ragged.columns()
        scalars["num_rows"] = self.num_none + num_rows + len(columns.get("ends", ()))
        if self.texts is not None:
            num_entries = self.first_entry(scalars["num_rows"])
            scalars["texts"], text_columns = self.texts.view(0, num_entries).state()
            columns |= text_columns
        return scalars, columns

    @classmethod
    def from_state(cls, scalars: dict[str, Any], columns: dict[str, Array]) -> Rows:
        """Build rows on columns that `state` gave, without a copy."""
        steps = StepRows(*(columns[name] for name in StepRows._fields))
        return cls(
            scalars["num_none"],
            Rectangle.of(steps, repeats_chosen=scalars["repeats_chosen"]),
            Ragged.of(columns) if "ends" in columns else None,
            Texts.from_state(scalars["texts"], columns) if "text_ids" in columns else None,
        )

    def without_none_first(self) -> Rows:
        """The same rows, None ones among them taking a byte each."""
        rows = Rows()
        rows._add_entries(self.entries(0, self.num_rows))
        rows.num_rows = self.num_rows
        return rows


class _Waiting:
    """Rows of one width with the ranks [r, 1, 2, ...], in Python's typed arrays, which take lists whole."""

    __slots__ = (
        "_ids",
        "_logprobs",
        "add_ids",
        "add_logprobs",
        "add_rank",
        "end",
        "no_texts",
        "num_taken",
        "order",
        "ranks",
        "texts",
        "width",
    )

    def __init__(self, width: int, end: int) -> None:
        self.width, self.num_taken = width, 0
        self.end = end  # rows of the record up to here wait
        self.order, self.no_texts = [*range(1, width)], [None] * width
        # Unsigned, so that a negative number is refused while it is copied.
        self._ids, self._logprobs, self.ranks = array("I"), array("d"), array("I")
        self.add_ids, self.add_logprobs = self._ids.fromlist, self._logprobs.fromlist
        self.add_rank: Callable[[Any], None] = self.ranks.append
        self.texts: list[str | None] | None = None  # of every entry; None where no row gave any

    def add_texts(self, texts: list[str | None]) -> None:
        """Note the texts of the row that is being added."""
        if len(texts) != self.width:
            raise TypeError("a text is missing")
        if self.texts is None:
            self.texts = [None] * (len(self.ranks) * self.width)
        self.texts += texts

    def forget_unfinished(self) -> None:
        """Take back what was added of a row that is none."""
        num_entries = len(self.ranks) * self.width
        del self._ids[num_entries:], self._logprobs[num_entries:], (self.texts or [])[num_entries:]

    def take(self) -> tuple[StepRows, list[str | None] | None]:
        """The rows that nobody has taken yet, and their texts."""
        first, last = self.num_taken, len(self.ranks)
        place = slice(first * self.width, last * self.width)
        shape = (last - first, self.width)
        ids = np.array(self._ids[place]).reshape(shape)
        logprobs = narrowed(np.array(self._logprobs[place])).reshape(shape)
        return StepRows(ids, logprobs, np.array(self.ranks[first:last])), self.texts and self.texts[place]


def _regular(entries: Entries) -> StepRows | None:
    """Rows as given as chosen + k best, if they are; None otherwise."""
    widths = np.diff(entries.offsets)
    width = int(widths[0]) if len(widths) else 0
    if not width or (widths != width).any():
        return None
    ranks = entries.ranks.reshape(-1, width)
    if ranks[:, 0].min() < 0 or (ranks[:, 1:] != np.arange(1, width)).any():
        return None
    logprobs = narrowed(entries.logprobs).reshape(-1, width)
    return StepRows(entries.token_ids.reshape(-1, width), logprobs, ranks[:, 0])
