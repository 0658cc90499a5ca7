"""The rows of one record, packed as long as they are regular.

Before it: rows from `rows_in`. After it: `FlatLogprobs`, which gives them the face of a list of dicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from logprobe.records.ragged_rows import Entries, RaggedRows, RowLists
from logprobe.records.rows_in import StepRows, as_step_rows, checked, row_entries
from logprobe.records.top_rows import TopRows

if TYPE_CHECKING:
    from collections.abc import Iterator

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
