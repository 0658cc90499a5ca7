"""The rows of one record, packed as long as they are regular.

Before it: rows from `rows_in`. After it: `FlatLogprobs`, which gives them the face of a list of dicts.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.store.columns import narrowed
from logprobe.records.store.ragged_rows import NO_RANK, Entries, RaggedRows, RowLists
from logprobe.records.store.top_rows import TopRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from logprobe.records.store.columns import Array
    from logprobe.records.values import Logprob

CHUNK_ROWS = 1024

Store: TypeAlias = RaggedRows | TopRows


class Rows:
    """Chooses the store: `TopRows` while every row is regular, `RaggedRows` from the first that is not.

    The change of store is one assignment, so a reader that took `store` goes on with a whole one.
    """

    __slots__ = ("store",)

    def __init__(self, store: Store | None = None) -> None:
        self.store: Store = RaggedRows() if store is None else store

    def append_none(self) -> None:
        """Add a position without entries that reads as None."""
        self._make_ragged().append_none()

    def append_step(self, rows: StepRows) -> None:
        """Add a step's rows, a chosen token that is among the k best kept once."""
        store = self.store
        if len(rows.token_ids) == 1 and isinstance(store, TopRows) and store.append_one(*rows):
            return
        if rows.logprobs.dtype == np.float32 and self._append_packed(rows, repeats_chosen=False):
            return
        rows = checked(rows)
        if not self._append_packed(rows, repeats_chosen=False):
            self._make_ragged().append_entries(rows.entries())

    def append_lists(self, row: RowLists, *, repeats_chosen: bool) -> None:
        """Add one row exactly as given; `repeats_chosen` says that the chosen token may stand twice."""
        entries = row_entries(row)
        k = self.store.k if isinstance(self.store, TopRows) else None
        rows = as_step_rows(row, entries, repeats_chosen=repeats_chosen, k=k)
        if rows is None or not self._append_packed(rows, repeats_chosen=repeats_chosen):
            self._make_ragged().append_entries(entries)

    def append_entries(self, entries: Entries) -> None:
        """Add a run of rows exactly as given."""
        self._make_ragged().append_entries(entries)

    def extend(self, other: Rows) -> None:
        """Add the rows that another record holds now."""
        store = other.store
        for start, stop in chunks(store.num_rows):
            self._append_part(store.view(start, stop))

    def cut(self, places: range) -> Rows:
        """The rows at `places`; without a copy where they are consecutive."""
        store = self.store
        if places.step == 1:
            return Rows(store.view(places.start, max(places.start, places.stop)))
        rows = np.arange(places.start, places.stop, places.step)
        if (
            isinstance(store, TopRows)
            and (np.diff(rows >= store.num_none) & (rows[1:] < store.num_none)).any()
        ):
            store = as_ragged(store)
        return Rows(store.take(rows))

    def _append_packed(self, rows: StepRows, *, repeats_chosen: bool) -> bool:
        """Add regular rows to a store that packs them, if they and what is there allow it."""
        store, k = self.store, rows.token_ids.shape[1] - 1
        if rows.logprobs.dtype != np.float32:
            return False
        if store.num_rows > store.num_none:
            if not isinstance(store, TopRows) or (store.k, store.repeats_chosen) != (k, repeats_chosen):
                return False
            return store.append(*rows)
        packed = TopRows(k, num_none=store.num_rows, repeats_chosen=repeats_chosen)
        if not packed.append(*rows):
            return False
        self.store = packed
        return True

    def _append_part(self, part: Store) -> None:
        is_blank = self.store.num_none == self.store.num_rows
        if isinstance(part, TopRows) and (is_blank or not part.num_none):
            for _ in range(part.num_none):
                self.append_none()
            part = part.view(part.num_none, part.num_rows)
            rows = StepRows(*part.columns(0, part.num_rows).joined())
            if self._append_packed(rows, repeats_chosen=part.repeats_chosen):
                return
        self._make_ragged().append_entries(part.entries(0, part.num_rows))

    def _make_ragged(self) -> RaggedRows:
        self.store = store = as_ragged(self.store)
        return store


def as_ragged(store: Store) -> RaggedRows:
    """The same rows in a store that holds any."""
    if isinstance(store, RaggedRows):
        return store
    ragged = RaggedRows()
    for start, stop in chunks(store.num_rows):
        ragged.append_entries(store.entries(start, stop))
    return ragged


def chunks(num_rows: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of at most CHUNK_ROWS rows that cover `num_rows`."""
    return ((start, min(start + CHUNK_ROWS, num_rows)) for start in range(0, num_rows, CHUNK_ROWS))


class StepRows(NamedTuple):
    """Rows of a step: column 0 is the chosen token, then the k best."""

    token_ids: Array  # (n, k + 1) integers >= 0
    logprobs: Array  # (n, k + 1) float32 or float64, nats
    ranks: Array  # (n,) integers, of the chosen token

    def entries(self) -> Entries:
        """The same rows as entries, a chosen token that is among the k best kept once."""
        n, width = self.token_ids.shape
        is_shown = np.ones((n, width), np.bool_)
        np.not_equal(self.token_ids[:, 1:], self.token_ids[:, :1], out=is_shown[:, 1:])
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


def step_rows(token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, ranks: npt.ArrayLike) -> StepRows:
    """A step's arrays, their shapes and types checked; `checked` looks at the values.

    Raises:
        ParameterError: shapes that do not agree, ids or ranks that are no integers.
    """
    rows = StepRows(np.asarray(token_ids), np.asarray(logprobs), np.asarray(ranks))
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
    return rows


def checked(rows: StepRows) -> StepRows:
    """The same rows, logprobs as float32 where that is exact.

    Raises:
        ParameterError: negative ids or ranks, +inf.
    """
    _check_not_negative(token_ids=rows.token_ids, ranks=rows.ranks)
    return rows._replace(logprobs=float_column(rows.logprobs))


def _check_not_negative(**columns: Array) -> None:
    for name, values in columns.items():
        if values.size and values.min() < 0:
            raise ParameterError(name, f"{int(values.min())} is negative; drop padding before appending")


def float_column(logprobs: Array) -> Array:
    """Float32 where every value is one exactly, else float64.

    Raises:
        ParameterError: a value is +inf.
    """
    if (logprobs == np.inf).any():
        raise ParameterError("logprobs", "a value is +inf, which no log-probability is; check the logits")
    return narrowed(logprobs)


def row_from_columns(
    token_ids: Iterable[int],
    logprobs: Iterable[float],
    ranks: Iterable[int | None],
    decoded_tokens: Iterable[str | None],
) -> RowLists:
    """One position from columns; `token_ids` sets the length, further values of the others are left alone.

    Raises:
        ParameterError: a column yields too few values.
    """
    ids = [int(token_id) for token_id in token_ids]
    columns: list[list[Any]] = []
    for name, values in (("logprobs", logprobs), ("ranks", ranks), ("decoded_tokens", decoded_tokens)):
        taken = list(islice(values, len(ids)))
        if len(taken) < len(ids):
            raise ParameterError(name, f"{len(taken)} values for {len(ids)} token ids; give one for each")
        columns.append(taken)
    texts = columns[2] if any(text is not None for text in columns[2]) else None
    return RowLists(ids, columns[0], columns[1], texts)


def row_from_position(position: Mapping[int, Logprob]) -> RowLists:
    """One position from a dict."""
    values = position.values()
    return row_from_columns(
        position,
        [value.logprob for value in values],
        [value.rank for value in values],
        [value.decoded_token for value in values],
    )


def row_entries(row: RowLists) -> Entries:
    """One row as entries.

    Raises:
        ParameterError: negative ids or ranks, +inf.
    """
    ids = np.array(row.token_ids, np.int64)
    ranks = np.array([NO_RANK if rank is None else rank for rank in row.ranks], np.int64)
    _check_not_negative(token_ids=ids, ranks=np.array([r for r in row.ranks if r is not None], np.int64))
    return Entries(
        offsets=np.array([0, len(ids)], np.int64),
        token_ids=ids,
        logprobs=float_column(np.array(row.logprobs, np.float64)),
        ranks=ranks,
        texts=None if row.texts is None else list(row.texts),
    )


def as_step_rows(row: RowLists, entries: Entries, *, repeats_chosen: bool, k: int | None) -> StepRows | None:
    """The row as chosen + k best, if its ranks say that it is one; None otherwise.

    `k` settles the one case in which ranks leave open whether the chosen token is the k-th best or the next.
    """
    ids, logprobs, ranks = entries.token_ids, entries.logprobs, list(row.ranks)
    if not ranks or ranks[0] is None or row.texts is not None:
        return None
    width = len(ranks)
    gap = next((place for place, rank in enumerate(ranks[1:], 1) if rank != place), width)
    if repeats_chosen or (gap == width and k != width):
        return StepRows(ids[None], logprobs[None], entries.ranks[:1]) if gap == width else None
    if ranks[gap:] != list(range(gap + 1, width + 1)):
        return None
    return StepRows(
        np.insert(ids, gap, ids[0])[None], np.insert(logprobs, gap, logprobs[0])[None], entries.ranks[:1]
    )


def given_columns(given: Sequence[npt.ArrayLike]) -> Entries:
    """Entries of ids that the caller named: offsets (n + 1,), ids, logprobs and ranks (N,).

    Raises:
        ParameterError: shapes that do not agree, negative ids or ranks, +inf.
    """
    offsets, ids, logprobs, ranks = (np.asarray(column) for column in given)
    if not ids.shape == logprobs.shape == ranks.shape == (int(offsets[-1] - offsets[0]),):
        raise ParameterError("given", f"offsets end at {offsets[-1]}, but {ids.shape} ids came with them")
    _check_not_negative(token_ids=ids, ranks=ranks)
    return Entries(offsets=offsets, token_ids=ids, logprobs=float_column(logprobs), ranks=ranks)
