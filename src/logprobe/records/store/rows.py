"""The rows of one record: those that wait, those that are packed, and the texts given with them.

Before it: rows from `inputs`. After it: `FlatLogprobs`, which gives them the face of a list of dicts.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from logprobe.records.store.columns import chunks, narrowed
from logprobe.records.store.entries import Entries, RowLists, StepRows
from logprobe.records.store.inputs import as_step_rows
from logprobe.records.store.pending import MAX_ENTRIES, Pending, PendingSteps
from logprobe.records.store.ragged_rows import RaggedRows
from logprobe.records.store.texts import Texts
from logprobe.records.store.top_rows import TopRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.store.columns import Array

MAX_ROWS = 1024  # that wait

Store: TypeAlias = RaggedRows | TopRows

STORES: dict[str, type[Store]] = {store.form: store for store in (RaggedRows, TopRows)}


class Rows:
    """Chooses the store: `TopRows` while every row is regular, `RaggedRows` from the first that is not.

    Rows that come one by one wait until there are many or until somebody reads; whoever packs them holds the
    lock. The change of store is one assignment, so a reader that took `store` goes on with a whole one.
    """

    __slots__ = ("_lock", "_pending", "_store", "num_rows", "texts")

    def __init__(self, store: Store | None = None, texts: Texts | None = None) -> None:
        self._store: Store = RaggedRows() if store is None else store
        self._pending: Pending | PendingSteps = Pending()
        self._lock = Lock()
        self.texts = texts  # None: no text was given so far
        self.num_rows = self._store.num_rows  # published last: a reader that sees a row finds all of it

    @property
    def store(self) -> Store:
        """All rows, packed; it may grow, but never moves."""
        if self._pending.num_rows:
            with self._lock:
                self._pack()
        return self._store

    # -- growing -----------------------------------------------------------------------------------------

    def append_none(self, count: int = 1) -> None:
        """Add positions without entries that read as None."""
        if not count:
            return
        self._store = store = self.store.as_ragged()
        for _ in range(count):
            store.append_none()
        self.num_rows = store.num_rows

    def append_step(self, rows: StepRows) -> None:
        """Add a step's `checked` rows, a chosen token that is among the k best kept once."""
        self._append_whole(rows, repeats_chosen=False, texts=None)

    def append_one(self, token_ids: Any, logprobs: Any, ranks: Any) -> bool:
        """`append_step` of one narrow row in a few microseconds; False where that should look."""
        if not type(token_ids) is type(logprobs) is type(ranks) is np.ndarray:
            return False
        pending = self._pending
        kind = (token_ids.shape, logprobs.shape, ranks.shape, token_ids.dtype, logprobs.dtype, ranks.dtype)
        if not isinstance(pending, PendingSteps) or pending.kind != kind or pending.num_rows >= MAX_ROWS:
            if not PendingSteps.takes(kind):
                return False
            with self._lock:
                self._pack()
                self._pending = pending = PendingSteps(kind)
        if not pending.add(token_ids.tobytes(), logprobs.tobytes(), ranks.tobytes()):
            return False
        self.num_rows += 1
        return True

    def append_position(self, row: RowLists, entries: Entries) -> None:
        """Add one row of different tokens, whose `row_entries` these are."""
        rows = as_step_rows(row, entries, self.store.k)
        if rows is None:
            self.append_entries(entries)
        else:
            self._append_whole(rows, repeats_chosen=False, texts=row.texts, ids=row.token_ids)

    def append_entries(self, entries: Entries) -> None:
        """Add a run of rows exactly as given."""
        store = self.store
        if entries.texts is not None or self.texts is not None:
            self._write_texts(store, entries.token_ids.tolist(), entries.texts)
        self._store = ragged = store.as_ragged()
        ragged.append_entries(entries)
        self.num_rows = ragged.num_rows

    def append_given(self, entries: Entries) -> None:
        """`append_entries` of rows that are packed where they are regular."""
        rows = _regular(entries)
        if rows is None:
            self.append_entries(entries)
        else:
            self._append_whole(rows, repeats_chosen=True, texts=entries.texts, ids=entries.token_ids.tolist())

    def extend(self, other: Rows) -> None:
        """Add the rows that another record holds now."""
        for start, stop in chunks(other.store.num_rows):
            self._append_part(other.cut(range(start, stop)))

    def _append_part(self, part: Rows) -> None:
        store, is_blank = part.store, self.store.num_none == self.num_rows
        rows = store.step_rows()
        entries = part.entries(0, store.num_rows)
        if rows is None or (store.num_none and not is_blank):
            self.append_entries(entries)
            return
        self.append_none(store.num_none)
        ids = entries.token_ids.tolist()
        self._append_whole(rows, repeats_chosen=store.repeats_chosen, texts=entries.texts, ids=ids)

    def _append_whole(
        self,
        rows: StepRows,
        *,
        repeats_chosen: bool,
        texts: Sequence[str | None] | None,
        ids: list[int] | None = None,
    ) -> None:
        """Add regular rows now; `texts` are those of the entries `ids` that they show."""
        self._add(self.store, rows, repeats_chosen=repeats_chosen, texts=texts, ids=ids)
        self.num_rows = self._store.num_rows

    def _add(
        self,
        store: Store,
        rows: StepRows,
        *,
        repeats_chosen: bool,
        texts: Sequence[str | None] | None,
        ids: list[int] | None = None,
    ) -> None:
        if texts is not None or self.texts is not None:
            shown = rows.entries(repeats_chosen=repeats_chosen).token_ids.tolist() if ids is None else ids
            self._write_texts(store, shown, texts)
        grown = store
        if store.num_rows == store.num_none:
            grown = TopRows(
                rows.token_ids.shape[1] - 1, num_none=store.num_rows, repeats_chosen=repeats_chosen
            )
        if not grown.append_rows(rows, repeats_chosen=repeats_chosen):
            grown = store.as_ragged()
            grown.append_rows(rows, repeats_chosen=repeats_chosen)
        self._store = grown

    def _write_texts(self, store: Store, ids: list[int], texts: Sequence[str | None] | None) -> None:
        """Note the texts of entries that are about to be added."""
        known = self.texts or Texts()
        known.write(store.first_entry(store.num_rows), ids, texts)
        self.texts = known

    # -- rows that wait ----------------------------------------------------------------------------------

    def add_soon(
        self,
        ids: list[int],
        logprobs: list[float],
        ranks: list[Any],
        texts: list[str | None] | None,
    ) -> bool:
        """Let one row wait, exactly as given; False where it is unusual."""
        if inf in logprobs:
            return False
        with self._lock:
            pending = self._pending
            if not isinstance(pending, Pending) or len(pending.ids) >= MAX_ENTRIES:
                self._pack()
                self._pending = pending = Pending()
            before = len(pending.ids)
            try:
                pending.ids.fromlist(ids)
                pending.logprobs.fromlist(logprobs)
                pending.ranks.fromlist(ranks)
            except (TypeError, OverflowError):  # not all unsigned 32-bit integers and numbers
                del pending.ids[before:], pending.logprobs[before:]
                return False
            if texts is not None or pending.texts is not None:
                pending.add_texts(before, texts)
            pending.ends.append(len(pending.ids))
        self.num_rows += 1
        return True

    def _pack(self) -> None:
        """Move what waits into the store; the caller holds the lock."""
        pending, store = self._pending, self._store
        count = pending.num_rows
        if not count:
            return
        is_done = count == 1 and self._pack_one(pending)
        if isinstance(pending, PendingSteps):
            if not is_done:
                self._add(store, pending.rows(count), repeats_chosen=False, texts=None)
            pending.forget(count)
            return
        if not is_done:
            self._pack_given(store, pending)
        self._pending = Pending()

    def _pack_given(self, store: Store, pending: Pending) -> None:
        entries = pending.entries()
        rows = _regular(entries)
        if rows is None:
            if entries.texts is not None or self.texts is not None:
                self._write_texts(store, entries.token_ids.tolist(), entries.texts)
            self._store = ragged = store.as_ragged()
            ragged.append_entries(entries)
        else:
            ids = None if entries.texts is None else pending.ids.tolist()
            self._add(store, rows, repeats_chosen=True, texts=entries.texts, ids=ids)

    def _pack_one(self, pending: Pending | PendingSteps) -> bool:
        """Pack one row without arrays, which would cost most of it; False where it is not as simple."""
        row, is_step = pending.row(), isinstance(pending, PendingSteps)
        if not row.ranks or row.texts is not None or self.texts is not None:
            return False
        ids, logprobs, (rank, *others), _ = row
        if rank is None or (not is_step and others != list(range(1, len(ids)))):
            return False
        return self._store.append_one(ids, logprobs, rank, repeats_chosen=not is_step)

    # -- reading -----------------------------------------------------------------------------------------

    def row(self, row: int) -> RowLists:
        """One row, not None, as Python values."""
        store = self.store
        lists, texts = store.row(row), self.texts
        return lists if texts is None else lists._replace(texts=texts.read(store.first_entry(row), lists[0]))

    def entries(self, start: int, stop: int) -> Entries:
        """The public columns of rows [start, stop)."""
        store = self.store
        entries, texts = store.entries(start, stop), self.texts
        if texts is None:
            return entries
        return replace(entries, texts=texts.read(store.first_entry(start), entries.token_ids.tolist()))

    def cut(self, places: range) -> Rows:
        """The rows at `places`; without a copy where they are consecutive."""
        store, texts = self.store, self.texts
        if places.step == 1:
            start, stop = places.start, max(places.start, places.stop)
            first, last = store.first_entry(start), store.first_entry(stop)
            return Rows(store.view(start, stop), None if texts is None else texts.view(first, last))
        rows = np.arange(places.start, places.stop, places.step)
        part = Rows(store.take(rows))
        if texts is not None and len(rows):
            first = int(rows.min())
            picked = self.entries(first, int(rows.max()) + 1).take(rows - first)
            part.texts = Texts()
            part.texts.write(0, picked.token_ids.tolist(), picked.texts)
        return part

    # -- carrying ----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Scalars and columns from which `from_state` builds the same rows."""
        scalars, columns = self.store.state()
        if self.texts is None:
            return scalars, columns
        num_entries = self.store.first_entry(scalars["num_rows"])
        scalars["texts"], text_columns = self.texts.view(0, num_entries).state()
        return scalars, columns | text_columns

    @classmethod
    def from_state(cls, scalars: dict[str, Any], columns: dict[str, Array]) -> Rows:
        """Build rows on columns that `state` gave, without a copy."""
        texts = Texts.from_state(scalars["texts"], columns) if "text_ids" in columns else None
        return cls(STORES[scalars["form"]].from_state(scalars, columns), texts)


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
