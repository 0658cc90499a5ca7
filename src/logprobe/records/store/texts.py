"""Texts that were given with entries: one a token id, and those that differ apart.

A token's text hardly ever changes within a record, so a text costs once for each id, not once for each entry.

Before it: `Rows`. After it: `FlatLogprobs`, which falls back on its token table where no text was given.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.store.columns import Array


class Texts:
    """The text of each entry of a record, or None; entries are numbered from the record's first."""

    __slots__ = ("_apart", "_apart_texts", "_base", "_since", "_text_of")

    def __init__(self, base: int = 0) -> None:
        self._base = base  # number of the first entry, in a slice of a record; the numbers below count on
        self._text_of: dict[int, str] = {}  # token id → its first text
        self._since: dict[int, int] = {}  # token id → the entry with which that text came
        self._apart = array("q")  # entries whose text is another one or none, ascending
        self._apart_texts: list[str | None] = []

    def write(self, at: int, token_ids: list[int], texts: Sequence[str | None] | None) -> None:
        """Note the texts of entries from `at` on; None: they have none."""
        given = [None] * len(token_ids) if texts is None else list(texts)
        if list(map(self._text_of.get, token_ids)) == given:
            return
        for entry, (token_id, text) in enumerate(zip(token_ids, given, strict=True), self._base + at):
            if text is not None and token_id not in self._text_of:
                # The entry before its text: a reader that finds the text knows from where on it counts.
                self._since[token_id] = entry
                self._text_of[token_id] = text
            elif self._text_of.get(token_id) != text:
                self._apart_texts.append(text)
                self._apart.append(entry)

    def read(self, at: int, token_ids: list[int]) -> list[str | None]:
        """The texts of entries from `at` on."""
        first = self._base + at
        read, since = self._text_of.get, self._since
        texts = [
            read(token_id) if since.get(token_id, entry + 1) <= entry else None
            for entry, token_id in enumerate(token_ids, first)
        ]
        low = bisect_left(self._apart, first)
        high = bisect_left(self._apart, first + len(token_ids), lo=low)
        for entry, text in zip(self._apart[low:high], self._apart_texts[low:high], strict=True):
            texts[entry - first] = text
        return texts

    def view(self, start: int, stop: int) -> Texts:
        """The texts of entries [start, stop), to grow on their own."""
        first, last = self._base + start, self._base + stop
        part = Texts(first)
        known = [token_id for token_id, entry in self._since.copy().items() if entry < last]
        part._since = {token_id: self._since[token_id] for token_id in known}
        part._text_of = {token_id: self._text_of[token_id] for token_id in known}
        low, high = bisect_left(self._apart, first), bisect_left(self._apart, last)
        part._apart, part._apart_texts = self._apart[low:high], self._apart_texts[low:high]
        return part

    def state(self) -> tuple[list[str | None], dict[str, Array]]:
        """The different texts and then those apart, and the columns that say whose they are."""
        return [*self._text_of.values(), *self._apart_texts], {
            "text_ids": np.array(list(self._text_of), np.int64),
            "text_since": np.array(list(self._since.values()), np.int64) - self._base,
            "text_apart": np.array(self._apart, np.int64) - self._base,
        }

    @classmethod
    def from_state(cls, texts: Sequence[str | None], columns: dict[str, Array]) -> Texts:
        """Read what `state` gave."""
        part, ids = cls(), columns["text_ids"].tolist()
        part._text_of = {
            token_id: text for token_id, text in zip(ids, texts, strict=False) if text is not None
        }
        part._since = dict(zip(ids, columns["text_since"].tolist(), strict=True))
        part._apart = array("q", columns["text_apart"].tolist())
        part._apart_texts = list(texts[len(ids) :])
        return part
