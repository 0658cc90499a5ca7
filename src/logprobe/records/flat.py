"""One request's log-probabilities as flat typed arrays that read like a list of dicts.

Before it: a step's arrays (`LogprobsTensors`), or a drop-in user's columns and dicts. After it: replies,
streams, files and user code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.store.columns import Array, Column, ColumnView
from logprobe.records.store.ragged_rows import Entries, RowLists
from logprobe.records.store.rows import Rows, given_columns, row_from_columns, row_from_position, step_rows
from logprobe.records.store.selection import chosen_entries, other_logprobs, top_entries
from logprobe.records.values import Logprob, LogprobsOnePosition

if TYPE_CHECKING:
    import numpy.typing as npt

    from logprobe.records.forms.compact import Precision
    from logprobe.records.info import LogprobsInfo
    from logprobe.records.store.rows import Store
    from logprobe.records.values import TokenTable


class FlatLogprobs(MutableSequence[LogprobsOnePosition | None]):
    """A list of `dict[int, Logprob]` held in typed columns; it only grows.

    One writer may append while others read: a reader sees the rows published so far, each whole. Texts come
    from `table` on access, or are those given with the entries. A slice is a container of its own.
    """

    __slots__ = ("_entropy", "given", "info", "rows", "table")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        positions: Iterable[LogprobsOnePosition | None] = (),
        *,
        table: TokenTable | None = None,
        info: LogprobsInfo | None = None,
    ) -> None:
        self.rows = Rows()
        self._entropy: Column | None = None  # (T,) float32, nats; NaN where it was not given
        self.given: FlatLogprobs | None = None  # ids that the caller named, position by position
        self.table = table
        self.info = info
        self.extend(positions)

    @classmethod
    def of(
        cls,
        store: Store,
        *,
        entropy: Array | None = None,
        given: FlatLogprobs | None = None,
        info: LogprobsInfo | None = None,
    ) -> FlatLogprobs:
        """Wrap a store and the columns beside it, without a copy."""
        record = cls(info=info)
        record.rows = Rows(store)
        record._entropy = None if entropy is None else Column.of(entropy)
        record.given = given
        return record

    # -- growing -----------------------------------------------------------------------------------------

    def append(self, value: LogprobsOnePosition | None) -> None:
        """Add one position from a dict, or a position without values from None.

        Raises:
            ParameterError: negative ids or ranks, +inf. Nothing is added then.
        """
        row = None if value is None else row_from_position(value)
        if self._has_side():
            self._append_side(1, None, None)
        if row is None:
            self.rows.append_none()
        else:
            self.rows.append_lists(row, repeats_chosen=False)

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
        row = row_from_columns(token_ids, logprobs, ranks, decoded_tokens)
        if self._has_side():
            self._append_side(1, None, None)
        self.rows.append_lists(row, repeats_chosen=True)

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
        rows = step_rows(token_ids, logprobs, ranks)
        if entropy is not None or given is not None or self._has_side():
            self._append_side(len(rows.ranks), entropy, None if given is None else given_columns(given))
        self.rows.append_step(rows)

    def append_entries(self, entries: Entries) -> None:
        """Add a run of positions exactly as given."""
        if self._has_side():
            self._append_side(len(entries.offsets) - 1, None, None)
        self.rows.append_entries(entries)

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        """Add positions; another FlatLogprobs is added column by column."""
        if not isinstance(values, FlatLogprobs):
            for position in values:
                self.append(position)
            return
        added = values[:]
        if self._has_side() or added.entropy is not None or added.given is not None:
            named = None if added.given is None else added.given.entries()
            self._append_side(len(added), added.entropy, named)
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

    def _has_side(self) -> bool:
        return self._entropy is not None or self.given is not None

    def _append_side(self, num_new: int, entropy: npt.ArrayLike | None, given: Entries | None) -> None:
        """Entropy and given ids of rows about to be added; neither costs anything until one is given."""
        values = None if entropy is None else np.asarray(entropy, np.float32)
        if values is not None and values.shape != (num_new,):
            raise ParameterError("entropy", f"{values.shape} values for {num_new} positions")
        if given is not None and len(given.offsets) != num_new + 1:
            raise ParameterError("given", f"{len(given.offsets)} offsets for {num_new} positions; give n + 1")
        at = len(self)
        if values is not None or self._entropy is not None:
            column = self._entropy or Column.of(np.full(at, np.nan, np.float32))
            column.write(at, np.full(num_new, np.nan, np.float32) if values is None else values)
            self._entropy = column
        if given is not None or self.given is not None:
            named = self.given or FlatLogprobs([None] * at)
            if given is None:
                named.extend([None] * num_new)
            else:
                named.append_entries(given)
            self.given = named

    # -- reading -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.rows.store.num_rows

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition | None: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs | None:
        store = self.rows.store
        if isinstance(index, slice):
            return self._cut(range(store.num_rows)[index])
        return self._position(store, range(store.num_rows)[operator.index(index)])

    def __iter__(self) -> Iterator[LogprobsOnePosition | None]:
        store = self.rows.store
        return (self._position(store, row) for row in range(store.num_rows))

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
        return f"FlatLogprobs({list(self)!r})"

    def copy(self) -> FlatLogprobs:
        """A container of its own; the rows so far are shared, never changed."""
        return self[:]

    def with_table(self, table: TokenTable | None) -> FlatLogprobs:
        """The same rows, their texts read from `table`."""
        joined = self[:]
        joined.table = table
        return joined

    def chosen(self, index: int) -> tuple[int, Logprob] | None:
        """Token id and numbers of the chosen token at one position; None where it has no entries."""
        store = self.rows.store
        place = range(store.num_rows)[operator.index(index)]
        row = None if store.is_none(place) else store.row(place)
        if row is None or not row.token_ids:
            return None
        token_id = row.token_ids[0]
        return token_id, Logprob(row.logprobs[0], row.ranks[0], self._text(row, 0))

    def _position(self, store: Store, place: int) -> LogprobsOnePosition | None:
        if store.is_none(place):
            return None
        row = store.row(place)
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
        if self._entropy is not None:
            part._entropy = Column.of(self._entropy.read(0, len(self))[np.array(places, np.intp)])
        if self.given is not None:
            stop = places.stop if places.stop >= 0 else None
            part.given = self.given[places.start : stop : places.step]
        return part

    # -- carrying ----------------------------------------------------------------------------------------

    def to_bytes(self, precision: Precision = "float32") -> bytes:
        """Header and columns as bytes; exact unless a smaller `precision` is asked for.

        Raises:
            ParameterError: an unknown precision; one below float32 for NaN or positive values.
        """
        from logprobe.records.forms import wire

        return wire.to_bytes(self, precision)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> FlatLogprobs:
        """Read what `to_bytes` wrote.

        Raises:
            InputError: not such bytes, a later version, or bytes cut short.
        """
        from logprobe.records.forms import wire

        return wire.from_bytes(data)

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
            return pick(store.entries(first, store.row_of(stop - 1) + 1))[start - base : stop - base]

        return ColumnView(store.first_entry(store.num_rows), read)

    def _texts(self, entries: Entries) -> list[str | None]:
        texts = entries.texts or [None] * len(entries.token_ids)
        if self.table is None:
            return texts
        read = self.table.token_text
        ids = entries.token_ids.tolist()
        return [read(token_id) if text is None else text for token_id, text in zip(ids, texts, strict=True)]

    @property
    def entropy(self) -> Array | None:
        """Entropy of each position's whole distribution, (T,) float32, nats; NaN where it was not given."""
        return None if self._entropy is None else self._entropy.read(0, len(self))

    @property
    def is_valid(self) -> Array:
        """False where a position holds NaN, (T,) bool."""
        entries = self.entries()
        is_valid = np.ones(len(entries.offsets) - 1, np.bool_)
        wrong = np.flatnonzero(np.isnan(entries.logprobs))
        is_valid[np.searchsorted(entries.offsets, wrong, side="right") - 1] = False
        return is_valid

    def entries(self) -> Entries:
        """All public columns at once, as arrays."""
        store = self.rows.store
        return store.entries(0, store.num_rows)

    def chosen_entries(self) -> Entries:
        """The chosen token of each position that has entries, as arrays."""
        return chosen_entries(self.rows.store, 0, len(self))

    def top_entries(self) -> Entries:
        """The k best of each position by rank, as arrays; k means k, whatever was chosen."""
        return top_entries(self.rows.store, 0, len(self))

    @property
    def other_logprob(self) -> Array:
        """Log of the mass outside each position's entries, (T,) float32, nats; NaN where it is None."""
        return other_logprobs(self.rows.store, 0, len(self))

    @property
    def nbytes(self) -> int:
        """Bytes of the values held; texts and spare room not counted."""
        side = 0 if self._entropy is None else 4 * len(self)
        return self.rows.store.nbytes + side + (0 if self.given is None else self.given.nbytes)

    @property
    def num_entries(self) -> int:
        """Number of entries of all positions."""
        return self.rows.store.first_entry(len(self))
