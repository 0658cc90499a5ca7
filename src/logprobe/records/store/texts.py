"""Texts appended with entries, stored once per token id; entries whose text differs are stored separately.

A token's text rarely changes within a record, so memory grows with distinct ids, not with entries.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.store.columns import Array


class Texts:
    """The text of each entry in a record; None for entries that were appended without one."""

    __slots__ = ("_apart_places", "_apart_rows", "_apart_texts", "_base", "_since", "_text_of")

    def __init__(self, base: int = 0) -> None:
        # in a slice of a record, the number of its first row; the row numbers below include it
        self._base = base
        self._text_of: dict[int, str] = {}  # token id → the first text given for it
        self._since: dict[int, int] = {}  # token id → row in which that text was first given
        self._apart_rows = array("q")  # rows of entries whose text differs from `_text_of`, ascending
        self._apart_places = array("q")  # indices of these entries in their rows
        self._apart_texts: list[str | None] = []

    def write(self, row: int, token_ids: list[int], texts: Sequence[str | None] | None) -> None:
        """Store the texts of a row's entries; None if no entry has a text."""
        given = [None] * len(token_ids) if texts is None else list(texts)
        if list(map(self._text_of.get, token_ids)) == given:
            return
        row += self._base
        for place, (token_id, text) in enumerate(zip(token_ids, given, strict=True)):
            known = self._text_of.get(token_id)
            if known is None and text is not None and token_id not in token_ids[:place]:
                # Set the row before the text, so that a concurrent reader that finds the text also finds
                # its row.
                self._since[token_id] = row
                self._text_of[token_id] = text
            elif known != text:
                self._apart_texts.append(text)
                self._apart_places.append(place)
                self._apart_rows.append(row)

    def read(self, row: int, token_ids: list[int]) -> list[str | None]:
        """Return the texts of a row's entries."""
        row += self._base
        text_of, since = self._text_of.get, self._since.get
        texts = [text_of(token_id) if since(token_id, row + 1) <= row else None for token_id in token_ids]
        apart = bisect_left(self._apart_rows, row)
        while apart < len(self._apart_rows) and self._apart_rows[apart] == row:
            texts[self._apart_places[apart]] = self._apart_texts[apart]
            apart += 1
        return texts

    def read_rows(self, row: int, offsets: Array, token_ids: Array) -> list[str | None]:
        """Return the texts of the entries of consecutive rows starting at `row`."""
        ids, texts = token_ids.tolist(), []
        for number, (first, last) in enumerate(pairwise(offsets.tolist()), row):
            texts += self.read(number, ids[first:last])
        return texts

    def view(self, start: int, stop: int) -> Texts:
        """Return the texts of rows [start, stop) as a copy that can grow on its own."""
        first, last = self._base + start, self._base + stop
        part = Texts(first)
        part._since = {token_id: row for token_id, row in self._since.copy().items() if row < last}
        part._text_of = {token_id: self._text_of[token_id] for token_id in part._since}
        place = slice(bisect_left(self._apart_rows, first), bisect_left(self._apart_rows, last))
        part._apart_rows, part._apart_places = self._apart_rows[place], self._apart_places[place]
        part._apart_texts = self._apart_texts[place]
        return part

    def state(self) -> tuple[list[str | None], dict[str, Array]]:
        """Return the texts (one per id, then the exceptions) and the columns that assign them."""
        return [*self._text_of.values(), *self._apart_texts], {
            "text_ids": np.array(list(self._text_of), np.int64),
            "text_since": np.array(list(self._since.values()), np.int64) - self._base,
            "text_apart": np.column_stack(
                [np.array(self._apart_rows, np.int64) - self._base, np.array(self._apart_places, np.int64)]
            ),
        }

    @classmethod
    def from_state(cls, texts: Sequence[str | None], columns: dict[str, Array]) -> Texts:
        """Restore an instance from the result of `state`."""
        part, ids = cls(), columns["text_ids"].tolist()
        part._text_of = {
            token_id: text for token_id, text in zip(ids, texts, strict=False) if text is not None
        }
        part._since = dict(zip(ids, columns["text_since"].tolist(), strict=True))
        part._apart_rows, part._apart_places = (
            array("q", column.tolist()) for column in columns["text_apart"].T
        )
        part._apart_texts = list(texts[len(ids) :])
        return part
