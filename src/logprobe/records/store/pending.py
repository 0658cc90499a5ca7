"""Rows that wait to be packed: typed Python arrays, to which a row is added in about a microsecond.

A NumPy call costs as much as all of that, so rows that come one by one are packed many at a time.

Before it: `Rows`. After it: a store.
"""

from __future__ import annotations

from array import array

import numpy as np

from logprobe.records.store.entries import Entries, RowLists

MAX_ENTRIES = 8192
ANY_WIDTH = 0


class Pending:
    """Rows of one kind: of a step (chosen + k best, one width, a rank a row), or exactly as given."""

    __slots__ = ("ends", "ids", "logprobs", "ranks", "texts", "width")

    def __init__(self, width: int = ANY_WIDTH) -> None:
        self.width = width  # k + 1 of a step's rows; ANY_WIDTH: rows as given
        # Unsigned, so that a negative number is refused while it is copied.
        self.ids, self.logprobs = array("I"), array("d")
        self.ranks = array("I")  # of each row's chosen token in a step, of every entry otherwise
        self.ends = array("q")  # ids up to and with each row
        self.texts: list[str | None] | None = None  # of every entry; None where no row gave any

    def add_texts(self, num_before: int, texts: list[str | None] | None) -> None:
        """Note the texts of the row that is being added behind `num_before` entries; None: it has none."""
        if self.texts is None:
            self.texts = [None] * num_before
        self.texts += [None] * (len(self.ids) - num_before) if texts is None else texts

    def row(self) -> RowLists:
        """The only row."""
        return RowLists(self.ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), self.texts)

    def entries(self) -> Entries:
        """All rows; of a step's rows the ranks are those of the chosen tokens alone."""
        offsets = np.zeros(len(self.ends) + 1, np.int64)
        offsets[1:] = self.ends
        return Entries(
            offsets=offsets,
            token_ids=np.array(self.ids),
            logprobs=np.array(self.logprobs),
            ranks=np.array(self.ranks),
            texts=self.texts,
        )
