"""One request's log-probabilities as flat typed arrays that read like a list of dicts.

Before it: a step's arrays (`LogprobsTensors`), or a drop-in user's columns and dicts. After it: replies,
streams, files and user code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, NoReturn, overload

from logprobe.records.forms import wire
from logprobe.records.store.columns import Array, ColumnView
from logprobe.records.store.entries import Entries, RowLists, with_holes
from logprobe.records.store.inputs import (
    checked,
    given_columns,
    row_entries,
    row_from_columns,
    row_from_position,
    spans_of,
    step_rows,
)
from logprobe.records.store.rows import Rows
from logprobe.records.store.side import Side
from logprobe.records.values import Logprob, LogprobsOnePosition

if TYPE_CHECKING:
    import numpy.typing as npt

    from logprobe.records.forms.wire import Precision
    from logprobe.records.info import LogprobsInfo
    from logprobe.records.values import TokenTable


class FlatLogprobs(MutableSequence[LogprobsOnePosition | None]):
    """A list of `dict[int, Logprob]` held in typed columns; it only grows.

    One writer may append while others read: a reader sees the rows published so far, each whole. Texts come
    from `table` on access, or are those given with the entries. A slice is a container of its own.
    """

    __slots__ = ("_side", "info", "rows", "table")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        positions: Iterable[LogprobsOnePosition | None] = (),
        *,
        table: TokenTable | None = None,
        info: LogprobsInfo | None = None,
    ) -> None:
        self.rows = Rows()
        self._side = Side()
        self.table = table
        self.info = info
        self.extend(positions)

    @classmethod
    def of(
        cls,
        rows: Rows,
        *,
        entropy: Array | None = None,
        given: Rows | None = None,
        info: LogprobsInfo | None = None,
    ) -> FlatLogprobs:
        """Wrap rows and the columns beside them, without a copy."""
        record = cls(info=info)
        record.rows, record._side = rows, Side(entropy, given)
        return record

    @classmethod
    def from_columns(
        cls,
        start_indices: npt.ArrayLike,
        end_indices: npt.ArrayLike,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None] = repeat(None),
    ) -> FlatLogprobs:
        """A record from its six columns: position i holds the entries [start_indices[i], end_indices[i]).

        A position that was None is one without entries here, `{}`: the columns do not tell them apart.

        Raises:
            ParameterError: too few values in a column, a position outside them, negative ids or ranks, +inf.
        """
        entries = row_entries(row_from_columns(token_ids, logprobs, ranks, decoded_tokens))
        record = cls()
        record.rows.append_given(spans_of(entries, start_indices, end_indices))
        return record

    # -- growing -----------------------------------------------------------------------------------------

    def append(self, logprobs_one_position: LogprobsOnePosition | None) -> None:
        """Add one position from a dict, or a position without values from None.

        Raises:
            ParameterError: negative ids or ranks, +inf. Nothing is added then.
        """
        row = None if logprobs_one_position is None else row_from_position(logprobs_one_position)
        entries = None if row is None else row_entries(row)
        if not self._side.is_empty:
            self._side.append(len(self), 1, None, None)
        if row is None or entries is None:
            self.rows.append_none()
        else:
            self.rows.append_position(row, entries)

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add one position from columns, exactly as given; `token_ids` sets how many entries it has.

        Raises:
            ParameterError: a column yields too few values; negative ids or ranks; +inf. Nothing is added.
        """
        ids = list(token_ids)
        n = len(ids)
        # This is called once a position, so each step counts: a list of the right length is not copied.
        values = logprobs if type(logprobs) is list and len(logprobs) == n else list(islice(logprobs, n))
        of_rank = ranks if type(ranks) is list and len(ranks) == n else list(islice(ranks, n))
        texts = list(islice(decoded_tokens, n))
        if len(values) == len(of_rank) == len(texts) == n and self._side.is_empty:
            has_texts = n > 0 and (texts[0] is not None or texts.count(None) < n)
            if self.rows.add_soon(ids, values, of_rank, texts if has_texts else None):
                return
        self.append_entries(row_entries(row_from_columns(ids, values, of_rank, texts)))

    def append_rows(
        self,
        token_ids: npt.ArrayLike,
        logprobs: npt.ArrayLike,
        ranks: npt.ArrayLike,
        *,
        entropy: npt.ArrayLike | None = None,
        given: Sequence[npt.ArrayLike] | None = None,
    ) -> None:
        """Add n positions from a step's arrays.

        `token_ids` and `logprobs` are (n, k + 1), column 0 the chosen token and then the k best; `ranks` (n,)
        are the chosen tokens'. A chosen token that is among the k best is kept once. `entropy` (n,) is in
        nats; `given` holds offsets (n + 1,), ids, logprobs and ranks (N,) of ids that the caller named.

        Raises:
            ParameterError: shapes that do not agree, negative ids or ranks, +inf. Nothing is added then.
        """
        has_side = entropy is not None or given is not None or not self._side.is_empty
        if not has_side and self.rows.append_one(token_ids, logprobs, ranks):
            return
        rows = checked(step_rows(token_ids, logprobs, ranks))
        if has_side:
            named = None if given is None else given_columns(given)
            self._side.append(len(self), len(rows.ranks), entropy, named)
        self.rows.append_step(rows)

    def append_entries(self, entries: Entries) -> None:
        """Add a run of positions exactly as given."""
        if not self._side.is_empty:
            self._side.append(len(self), len(entries.offsets) - 1, None, None)
        self.rows.append_entries(entries)

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        """Add positions; another FlatLogprobs is added column by column."""
        if not isinstance(values, FlatLogprobs):
            for position in values:
                self.append(position)
            return
        added = values[:]
        if not self._side.is_empty or added.entropy is not None or added.given is not None:
            named = None if added.given is None else added.given.entries()
            self._side.append(len(self), len(added), added.entropy, named)
        self.rows.extend(added.rows)

    def insert(self, index: int, value: LogprobsOnePosition | None) -> NoReturn:
        """Refuse: the container only grows."""
        self._refuse(index, value)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._refuse(index, value)

    def __delitem__(self, index: Any) -> NoReturn:
        self._refuse(index)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "FlatLogprobs only grows: no setting, deleting, inserting, popping or reversing; slice it"
        )

    pop = remove = clear = reverse = _refuse

    # -- reading -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.rows.num_rows

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition | None: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs | None:
        places = range(self.rows.num_rows)
        if isinstance(index, slice):
            return self._cut(places[index])
        return self._position(places[operator.index(index)])

    def __iter__(self) -> Iterator[LogprobsOnePosition | None]:
        return map(self._position, range(self.rows.num_rows))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FlatLogprobs):
            if len(self) != len(other):
                return False
            return all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        if not isinstance(other, list):
            return NotImplemented
        return len(self) == len(other) and all(
            mine == theirs for mine, theirs in zip(self, other, strict=True)
        )

    def __add__(self, other: Iterable[LogprobsOnePosition | None]) -> FlatLogprobs:
        joined = self.copy()
        joined.extend(other)
        return joined

    def __repr__(self) -> str:
        return f"<FlatLogprobs: {len(self)} positions, {self.num_entries} entries>"

    def copy(self) -> FlatLogprobs:
        """A container of its own; the rows so far are shared."""
        return self[:]

    def with_table(self, table: TokenTable | None) -> FlatLogprobs:
        """The same rows, their texts read from `table`."""
        joined = self[:]
        joined.table = table
        return joined

    def chosen(self, index: int) -> tuple[int, Logprob] | None:
        """Token id and numbers of the chosen token at one position; None where it has no entries."""
        row = self._row(range(self.rows.num_rows)[operator.index(index)])
        if row is None or not row.token_ids:
            return None
        return row.token_ids[0], Logprob(row.logprobs[0], row.ranks[0], self._text(row, 0))

    def _row(self, place: int) -> RowLists | None:
        return None if self.rows.store.is_none(place) else self.rows.row(place)

    def _position(self, place: int) -> LogprobsOnePosition | None:
        row = self._row(place)
        if row is None:
            return None
        if self.table is None and row.texts is None:
            return dict(zip(row.token_ids, map(Logprob, row.logprobs, row.ranks), strict=True))
        texts = [self._text(row, entry) for entry in range(len(row.token_ids))]
        return dict(zip(row.token_ids, map(Logprob, row.logprobs, row.ranks, texts), strict=True))

    def _text(self, row: RowLists, entry: int) -> str | None:
        given = None if row.texts is None else row.texts[entry]
        if given is None and self.table is not None:
            return self.table.token_text(row.token_ids[entry])
        return given

    def _cut(self, places: range) -> FlatLogprobs:
        part = FlatLogprobs(table=self.table, info=self.info)
        part.rows = self.rows.cut(places)
        part._side = self._side.cut(places, len(self))
        return part

    # -- carrying ----------------------------------------------------------------------------------------

    def to_bytes(self, precision: Precision = "float32") -> bytes:
        """Header and columns as bytes; exact unless a smaller `precision` is asked for.

        Raises:
            ParameterError: an unknown precision; one below float32 for NaN or positive values.
        """
        return wire.encode(wire.Parts(self.rows, self.entropy, self._side.given, self.info), precision)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> FlatLogprobs:
        """Read what `to_bytes` wrote.

        Raises:
            InputError: not such bytes, a later version, or bytes cut short.
        """
        rows, entropy, given, info = wire.decode(data)
        return cls.of(rows, entropy=entropy, given=given, info=info)

    def __reduce__(self) -> tuple[Callable[[bytes], FlatLogprobs], tuple[bytes]]:
        return FlatLogprobs.from_bytes, (self.to_bytes(),)

    # -- whole columns -----------------------------------------------------------------------------------

    @property
    def start_indices(self) -> ColumnView:
        """First entry of each position."""
        store = self.rows.store
        return ColumnView(store.num_rows, lambda start, stop: store.offsets(start, stop)[:-1].tolist())

    @property
    def end_indices(self) -> ColumnView:
        """One past the last entry of each position."""
        store = self.rows.store
        return ColumnView(store.num_rows, lambda start, stop: store.offsets(start, stop)[1:].tolist())

    @property
    def token_ids(self) -> ColumnView:
        """Token id of each entry."""
        return self._entry_column(lambda entries: entries.token_ids.tolist())

    @property
    def logprobs(self) -> ColumnView:
        """Log-probability of each entry, nats."""
        return self._entry_column(lambda entries: entries.logprobs.tolist())

    @property
    def ranks(self) -> ColumnView:
        """1-based rank of each entry; None where none was given."""
        return self._entry_column(Entries.rank_list)

    @property
    def decoded_tokens(self) -> ColumnView:
        """Text of each entry: the one given with it, else the table's, else None."""
        return self._entry_column(self._texts)

    def _entry_column(self, pick: Callable[[Entries], list[Any]]) -> ColumnView:
        store = self.rows.store

        def read(start: int, stop: int) -> list[Any]:
            if start == stop:
                return []
            first = store.row_of(start)
            base = store.first_entry(first)
            return pick(self.rows.entries(first, store.row_of(stop - 1) + 1))[start - base : stop - base]

        return ColumnView(store.first_entry(store.num_rows), read)

    def _texts(self, entries: Entries) -> list[str | None]:
        texts = entries.texts or [None] * len(entries.token_ids)
        if self.table is None:
            return texts
        read, ids = self.table.token_text, entries.token_ids.tolist()
        return [read(token_id) if text is None else text for token_id, text in zip(ids, texts, strict=True)]

    @property
    def entropy(self) -> Array | None:
        """Entropy of each position's whole distribution, (T,) float32, nats; NaN where it was not given."""
        return self._side.entropy(len(self))

    @property
    def given(self) -> FlatLogprobs | None:
        """Ids that the caller named, position by position; None where there are none."""
        return None if self._side.given is None else FlatLogprobs.of(self._side.given)

    @property
    def is_valid(self) -> Array:
        """False where a position holds NaN, (T,) bool."""
        return self.entries().is_valid()

    def entries(self) -> Entries:
        """All public columns at once, as arrays."""
        return self.rows.entries(0, self.rows.num_rows)

    def chosen_entries(self) -> Entries:
        """The chosen token of each position, as arrays of one value a position.

        Where positions have no entries, such as a prompt's first, the columns are masked arrays with a hole
        there: it prints as `--`, `tolist()` gives None, and sums leave it out.
        """
        return with_holes(self.rows.store.chosen_entries(0, len(self)))

    def top_entries(self) -> Entries:
        """The k best of each position by rank, as arrays; k means k, whatever was chosen."""
        return self.rows.store.top_entries(0, len(self))

    @property
    def other_logprob(self) -> Array:
        """Log of the mass outside each position's entries, (T,) float32, nats; NaN where it is None."""
        return self.rows.store.other_logprobs(0, len(self))

    @property
    def nbytes(self) -> int:
        """Bytes of the values held; texts and spare room not counted."""
        named, entropy = self._side.given, self.entropy
        side = (0 if named is None else named.store.nbytes) + (0 if entropy is None else entropy.nbytes)
        return self.rows.store.nbytes + side

    @property
    def num_entries(self) -> int:
        """Number of entries of all positions."""
        return self.rows.store.first_entry(len(self))
