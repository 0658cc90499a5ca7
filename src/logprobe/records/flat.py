"""`FlatLogprobs`: log-probabilities of one request, stored as flat arrays and read like a list of dicts.

Records are filled from the arrays of an engine step (`HostRows`), or from columns and dicts by the methods
that vLLM's class of this name has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

from logprobe.records.forms import frames, html, picture, wire
from logprobe.records.store.entries import Entries, RowLists, logs_outside_top, texts_of, with_holes
from logprobe.records.store.inputs import (
    given_columns,
    lists_of,
    row_entries,
    row_from_columns,
    row_from_position,
    spans_of,
    step_row,
)
from logprobe.records.store.rows import Rows
from logprobe.records.store.steps import Steps
from logprobe.records.values import IdLists, Logprob, LogprobsOnePosition

if TYPE_CHECKING:
    import numpy.typing as npt

    from logprobe._arrow import pa
    from logprobe.records.forms.picture import Picture
    from logprobe.records.forms.wire import Precision
    from logprobe.records.info import LogprobsInfo
    from logprobe.records.store.columns import Array
    from logprobe.records.values import TokenTable

T = TypeVar("T")


class ListColumn(Generic[T]):
    """Column of `FlatLogprobs` as a Python list; built on first access and cached until the record grows."""

    def __init__(self, read: Callable[[Entries, TokenTable | None], list[T]], doc: str) -> None:
        self._read = read
        self._name = ""
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, record: None, owner: type) -> ListColumn[T]: ...
    @overload
    def __get__(self, record: FlatLogprobs, owner: type) -> list[T]: ...
    def __get__(self, record: FlatLogprobs | None, owner: type) -> ListColumn[T] | list[T]:
        if record is None:
            return self
        length, table, values = record._lists.get(self._name, (-1, None, []))  # noqa: SLF001 - descriptor of the class
        if length != len(record) or table is not record.table:
            arrays = record.arrays
            values = self._read(arrays, record.table)
            record._lists[self._name] = (len(arrays.offsets) - 1, record.table, values)  # noqa: SLF001
        return values


@dataclass(init=False, repr=False, eq=False)
class FlatLogprobs(MutableSequence[LogprobsOnePosition | None]):
    """Append-only list of `dict[int, Logprob]`, stored in typed columns.

    One thread may append while others read; readers see only complete rows. Token texts are looked up in
    `table` on access, except for entries that were appended with a text. A slice is an independent record.
    The dataclass fields are Python lists over the whole record, as in vLLM; the arrays in `arrays` are
    faster.
    """

    start_indices: ListColumn[int] = ListColumn(
        lambda arrays, _: arrays.offsets[:-1].tolist(), "First entry of each position."
    )
    end_indices: ListColumn[int] = ListColumn(
        lambda arrays, _: arrays.offsets[1:].tolist(), "One past the last entry of each position."
    )
    token_ids: ListColumn[int] = ListColumn(
        lambda arrays, _: arrays.token_ids.tolist(), "Token id of each entry."
    )
    logprobs: ListColumn[float] = ListColumn(
        lambda arrays, _: arrays.logprobs.tolist(), "Log-probability of each entry, nats."
    )
    ranks: ListColumn[int | None] = ListColumn(
        lambda arrays, _: arrays.rank_list(), "1-based rank of each entry; None if not given."
    )
    decoded_tokens: ListColumn[str | None] = ListColumn(
        Entries.text_list, "Text of each entry: the given one, else the table's, else None."
    )

    __slots__ = ("_lists", "rows", "table")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        positions: Iterable[LogprobsOnePosition | None] = (),
        end_indices: npt.ArrayLike | None = None,
        token_ids: Iterable[int] | None = None,
        logprobs: Iterable[float] | None = None,
        ranks: Iterable[int | None] | None = None,
        decoded_tokens: Iterable[str | None] | None = None,
        *,
        start_indices: npt.ArrayLike | None = None,
        table: TokenTable | None = None,
        info: LogprobsInfo | None = None,
    ) -> None:
        """Create a record from positions, or from columns as in `from_columns`.

        With columns, the first positional argument is `start_indices`.

        Raises:
            ParameterError: for the reasons given in `append` and `from_columns`.
        """
        self.rows = Rows(info)
        self.table = table
        self._lists: dict[str, tuple[int, TokenTable | None, list[Any]]] = {}  # cache of `ListColumn`
        columns = (end_indices, token_ids, logprobs, ranks, decoded_tokens)
        if start_indices is None and all(column is None for column in columns):
            self.extend(positions)
            return
        row = row_from_columns(
            () if token_ids is None else token_ids,
            () if logprobs is None else logprobs,
            repeat(None) if ranks is None else ranks,
            repeat(None) if decoded_tokens is None else decoded_tokens,
        )
        starts: Any = positions if start_indices is None else start_indices
        ends: Any = () if end_indices is None else end_indices
        self.rows.append_entries(spans_of(row_entries(row), starts, ends))

    @classmethod
    def of(cls, rows: Rows, table: TokenTable | None = None) -> FlatLogprobs:
        """Create a record of the given rows, without copying them."""
        record = cls.__new__(cls)
        record.rows, record.table = rows, table
        record._lists = {}  # noqa: SLF001 - own class
        return record

    @property
    def info(self) -> LogprobsInfo | None:
        """Metadata of the record."""
        return self.rows.info

    @info.setter
    def info(self, info: LogprobsInfo | None) -> None:
        self.rows.info = info

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
        """Create a record from columns; position i owns the entries [start_indices[i], end_indices[i]).

        A position that was None becomes an empty position, `{}`, because columns cannot tell the two apart.

        Raises:
            ParameterError: a column has too few values, a position lies outside the columns, an id or rank is
                negative, or a log-probability is +inf.
        """
        columns = (end_indices, token_ids, logprobs, ranks, decoded_tokens)
        return cls((), *columns, start_indices=start_indices)

    def append(self, logprobs_one_position: LogprobsOnePosition | None) -> None:
        """Append one position; None stands for a position without a prediction.

        Raises:
            ParameterError: an id or rank is negative, or a log-probability is +inf. Nothing is added.
        """
        if logprobs_one_position is None:
            self.rows.append_none()
            return
        row = row_from_position(logprobs_one_position)
        step = step_row(row, self.rows.width - 1)
        if step is None or not self.rows.append_step(*step, False):
            self.rows.append_entries(row_entries(row))

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Append one position from columns exactly as given; `token_ids` sets the number of entries.

        Raises:
            ParameterError: a column has too few values, an id or rank is negative, or a log-probability is
                +inf. Nothing is added.
        """
        ids, values, of_rank, texts = lists_of(token_ids, logprobs, ranks, decoded_tokens)
        is_step = bool(ids) and of_rank[1:] == [*range(1, len(ids))]
        if not (is_step and self.rows.append_step(ids, values, of_rank[0], texts, True)):
            self.rows.append_entries(row_entries(RowLists(ids, values, of_rank, texts)))

    def append_rows(
        self,
        token_ids: npt.ArrayLike,
        logprobs: npt.ArrayLike,
        ranks: npt.ArrayLike,
        *,
        given: Sequence[npt.ArrayLike] | None = None,
        kept: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        **extras: npt.ArrayLike | None,
    ) -> None:
        """Append n positions from the arrays of an engine step.

        Args:
            token_ids: shape (n, k + 1); column 0 holds the chosen token, the others the k most likely tokens.
                A chosen token that is also among the k appears only once in the record.
            logprobs: shape (n, k + 1), in nats.
            ranks: shape (n,), ranks of the chosen tokens.
            given: caller-specified ids as four arrays: offsets (n + 1,), then ids, logprobs and ranks (N,).
            kept: ids that masks and truncation kept, as two arrays: offsets (n + 1,), then the ids, ascending
                within each position.
            extras: columns of shape (n,) by name, such as `entropy`; NaN means that a value is missing.

        Raises:
            ParameterError: the shapes do not match, an id or rank is negative, a log-probability is +inf,
                or a column is unknown. Nothing is added.
        """
        is_bare = not extras and given is None and kept is None
        if is_bare and self.rows.append_one(token_ids, logprobs, ranks):  # fast path, called for every token
            return
        steps = Steps.of(token_ids, logprobs, ranks)
        if not is_bare:
            named = None if given is None else given_columns(given)
            self.rows.append_beside(len(steps.ranks), extras, named, kept)
        self.rows.append_steps(steps)

    def append_entries(self, entries: Entries) -> None:
        """Append consecutive positions exactly as given."""
        self.rows.append_entries(entries)

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        """Append positions; another `FlatLogprobs` is appended column by column."""
        if isinstance(values, FlatLogprobs):
            self.rows.extend(values.copy().rows)
            return
        for position in values:
            self.append(position)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "FlatLogprobs is append-only: its positions cannot be set, deleted, inserted or reordered; "
            "take a slice instead"
        )

    insert = __setitem__ = __delitem__ = pop = remove = clear = reverse = _refuse

    def __len__(self) -> int:
        return self.rows.num_rows

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition | None: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs | None:
        places = range(self.rows.num_rows)
        if isinstance(index, slice):
            return FlatLogprobs.of(self.rows.cut(places[index]), self.table)
        return self._position(places[operator.index(index)])

    def __iter__(self) -> Iterator[LogprobsOnePosition | None]:
        return map(self._position, range(self.rows.num_rows))

    def __eq__(self, other: object) -> bool:
        """Compare positions as dicts; `extras`, `given`, `kept` and `info` are ignored."""
        if not isinstance(other, FlatLogprobs | list):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def __add__(self, other: Iterable[LogprobsOnePosition | None]) -> FlatLogprobs:
        joined = self.copy()
        joined.extend(other)
        return joined

    def __repr__(self) -> str:
        return f"<FlatLogprobs: {len(self)} positions, {self.num_entries} entries>"

    def _repr_html_(self) -> str:
        return html.shaded([self])

    def copy(self) -> FlatLogprobs:
        """Return an independent record with the same rows; stored arrays are shared, not copied."""
        return self[:]

    __copy__ = copy

    def __deepcopy__(self, memo: object) -> FlatLogprobs:
        return self.copy()

    def with_table(self, table: TokenTable | None) -> FlatLogprobs:
        """Return a record with the same rows whose token texts come from `table`."""
        return FlatLogprobs.of(self.copy().rows, table)

    def chosen(self, index: int) -> tuple[int, Logprob] | None:
        """Return the id and `Logprob` of the chosen token at a position; None if the position is empty."""
        row = self.rows.row(range(self.rows.num_rows)[operator.index(index)])
        if row is None or not row.token_ids:
            return None
        (text,) = texts_of(row.token_ids[:1], row.texts, self.table)
        return row.token_ids[0], Logprob(row.logprobs[0], row.ranks[0], text)

    def _position(self, place: int) -> LogprobsOnePosition | None:
        row = self.rows.row(place)
        if row is None:
            return None
        if self.table is None and row.texts is None:
            return dict(zip(row.token_ids, map(Logprob, row.logprobs, row.ranks), strict=True))
        texts = texts_of(row.token_ids, row.texts, self.table)
        return dict(zip(row.token_ids, map(Logprob, row.logprobs, row.ranks, texts), strict=True))

    def to_bytes(self, precision: Precision = "float32") -> bytes:
        """Serialize the record to bytes, without loss if `precision` is "float32".

        Raises:
            ParameterError: `precision` is unknown, or it is below float32 and a value is NaN or positive.
        """
        return wire.encode(self.copy().rows, precision)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> FlatLogprobs:
        """Deserialize a record from the output of `to_bytes`.

        Raises:
            InputError: `data` is not a record, has an unknown version, or is malformed or truncated.
        """
        return cls.of(wire.decode(data))

    def to_arrow(self) -> pa.Table:
        """Return a table for inspection with one row per position; to write files, use `records.to_arrow`."""
        return frames.table(self.copy().rows, self.table)

    def to_pandas(self) -> Any:
        """Return `to_arrow` as a pandas data frame; raises `MissingPackageError` if there is no pandas."""
        return frames.to_pandas(self.copy().rows, self.table)

    def to_polars(self) -> Any:
        """Return `to_arrow` as a polars data frame; raises `MissingPackageError` if there is no polars."""
        return frames.to_polars(self.copy().rows, self.table)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of plain values: `info`, and the rows of `to_arrow` under `positions`."""
        return frames.to_dict(self.copy().rows, self.table)

    def to_json(self) -> str:
        """Return `to_dict` as JSON. -inf becomes -9999, inf (in extra columns only) 9999, and NaN null."""
        return frames.to_json(self.copy().rows, self.table)

    def plot(self) -> Picture:
        """Plot surprisals and calibration; needs matplotlib (`pip install 'logprobe[plot]'`).

        Raises:
            MissingPackageError: matplotlib is not installed.
            ParameterError: the record has no tokens.
        """
        return picture.draw_record(self.copy().rows, self.table)

    def __reduce__(self) -> tuple[Callable[[bytes], FlatLogprobs], tuple[bytes]]:
        return FlatLogprobs.from_bytes, (self.to_bytes(),)

    @property
    def extras(self) -> dict[str, Array]:
        """Extra columns by name, each of shape (T,); NaN where a value is missing."""
        return self.rows.extras(0, len(self))

    @property
    def entropy(self) -> Array | None:
        """Entropy of each position's whole distribution, (T,) float32 in nats; NaN where missing."""
        return self.extras.get("entropy")

    @property
    def log_kept_mass(self) -> Array | None:
        """Log of the probability that masks and truncation kept at each position, (T,) float32 in nats.

        The probability is measured in the raw distribution at the request's temperature (1 for greedy
        requests). None for raw records. If only masks and truncation changed a row, a kept token's raw
        logprob at that temperature is the sum of its processed logprob and this value.
        """
        return self.extras.get("log_kept_mass")

    @property
    def kept(self) -> IdLists | None:
        """Token ids that masks and truncation kept at each position, ascending; None if not requested."""
        return self.rows.kept(0, len(self))

    @property
    def given(self) -> FlatLogprobs | None:
        """Record of the caller-specified token ids at each position; None if there are none."""
        rows = self.rows.given(0, len(self))
        return None if rows is None else FlatLogprobs.of(rows)

    @property
    def is_valid(self) -> Array:
        """(T,) bool; False where an entry of a position is NaN."""
        return self.arrays.is_valid()

    @property
    def arrays(self) -> Entries:
        """All entries as NumPy arrays; the chosen token of each position comes first."""
        return self.rows.entries(0, self.rows.num_rows)

    def chosen_entries(self) -> Entries:
        """Return the chosen token of each position, as arrays with one value per position.

        If a position has no entries, such as a prompt's first, the columns are masked arrays: the masked
        value prints as `--`, is None in `tolist()`, and is skipped by sums.
        """
        return with_holes(self.rows.chosen_entries(0, len(self)))

    def top_entries(self) -> Entries:
        """Return the k most likely tokens of each position by rank, as arrays.

        The chosen token is included only if it is one of the k.
        """
        return self.rows.top_entries(0, len(self))

    @property
    def other_logprob(self) -> Array:
        """Log of the total probability of all tokens without an entry at the position, (T,) float32 nats.

        The entries are the k most likely tokens and the chosen token. NaN for positions without a prediction.
        """
        return self._logs_outside_top(with_chosen=True)

    @property
    def outside_top_logprob(self) -> Array:
        """Log of the total probability outside the k tokens of `top_entries`, (T,) float32 in nats.

        The chosen token is treated like any other. NaN for positions without a prediction.
        """
        return self._logs_outside_top(with_chosen=False)

    def _logs_outside_top(self, *, with_chosen: bool) -> Array:
        length = len(self)  # read once: another thread may append meanwhile
        chosen, top = self.rows.chosen_entries(0, length), self.rows.top_entries(0, length)
        return logs_outside_top(chosen, top, with_chosen=with_chosen)

    @property
    def nbytes(self) -> int:
        """Size of the stored values in bytes; texts and unused capacity are not counted."""
        return self.rows.nbytes

    @property
    def num_entries(self) -> int:
        """Total number of entries at all positions."""
        return self.rows.num_entries
