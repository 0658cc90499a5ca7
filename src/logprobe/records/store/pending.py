"""Rows that wait to be packed: bytes and typed Python arrays, to which a row is added in about a microsecond.

A NumPy call on numbers costs as much as all of that, so rows that come one by one are packed many at a time.

Before it: `Rows`. After it: a store.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any, Final, TypeAlias

import numpy as np

from logprobe.records.store.entries import Entries, RowLists, StepRows

MAX_ENTRIES: Final = 8192
MAX_WIDTH: Final = 65  # up to here one row is quicker with others than by itself
_INF: Final = np.float32(np.inf).tobytes()

_INTEGERS: Final = {np.dtype(np.int32), np.dtype(np.int64)}

Kind: TypeAlias = "tuple[Any, Any, Any, np.dtype[Any], np.dtype[Any], np.dtype[Any]]"
"""Shapes and types of the ids, logprobs and ranks of a step's row."""


class Pending:
    """Rows exactly as given, of any widths."""

    __slots__ = ("ends", "ids", "logprobs", "ranks", "texts")

    def __init__(self) -> None:
        # Unsigned, so that a negative number is refused while it is copied.
        self.ids, self.logprobs, self.ranks = array("I"), array("d"), array("I")
        self.ends = array("q")  # ids up to and with each row
        self.texts: list[str | None] | None = None  # of every entry; None where no row gave any

    @property
    def num_rows(self) -> int:
        """Rows that wait."""
        return len(self.ends)

    def add_texts(self, num_before: int, texts: list[str | None] | None) -> None:
        """Note the texts of the row that is being added behind `num_before` entries; None: it has none."""
        if self.texts is None:
            self.texts = [None] * num_before
        self.texts += [None] * (len(self.ids) - num_before) if texts is None else texts

    def row(self) -> RowLists:
        """The only row."""
        return RowLists(self.ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), self.texts)

    def entries(self) -> Entries:
        """All rows."""
        offsets = np.zeros(len(self.ends) + 1, np.int64)
        offsets[1:] = self.ends
        return Entries(
            offsets=offsets,
            token_ids=np.array(self.ids),
            logprobs=np.array(self.logprobs),
            ranks=np.array(self.ranks),
            texts=self.texts,
        )


class PendingSteps:
    """Rows of a step, chosen + k best, each as the bytes of its arrays; all of one kind.

    One writer adds without a lock: a row is added in one step, and leaves once it is packed.
    """

    __slots__ = ("_expected", "_rows", "_signs", "_types", "kind", "width")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        (_, self.width), _, _, id_type, logprob_type, rank_type = kind
        self._rows: list[bytes] = []
        parts = [("ids", id_type, (self.width,)), ("logprobs", logprob_type, (self.width,))]
        self._types = np.dtype([*parts, ("rank", rank_type)])
        self._signs, self._expected = (
            _signs(self._types, "ids", "logprobs", "rank"),
            _signs(self._types, "logprobs"),
        )

    @staticmethod
    def takes(kind: Kind) -> bool:
        """Whether rows of this kind can wait: one position of one width and of the usual types."""
        shape, logprobs_shape, ranks_shape, id_type, logprob_type, rank_type = kind
        is_one = len(shape) == 2 and shape[0] == 1 and shape == logprobs_shape and ranks_shape == (1,)
        is_usual = logprob_type == np.float32 and {id_type, rank_type} <= _INTEGERS
        return is_one and is_usual and 0 < shape[1] <= MAX_WIDTH

    @property
    def num_rows(self) -> int:
        """Rows that wait."""
        return len(self._rows)

    def add(self, ids: bytes, logprobs: bytes, ranks: bytes) -> bool:
        """Add one row; False where an id or rank is negative, or a logprob may be +inf."""
        row = ids + logprobs + ranks
        # Numbers as they usually are, told by their signs: no id is negative, every logprob is.
        signs = int.from_bytes(row, sys.byteorder) & self._signs
        if signs != self._expected and (signs | self._expected != self._expected or _INF in logprobs):
            return False
        self._rows.append(row)
        return True

    def row(self) -> RowLists:
        """The first row: its ids and logprobs, and the chosen token's rank alone."""
        ids, logprobs, ranks = self.rows(1)
        return RowLists(ids[0].tolist(), logprobs[0].tolist(), ranks.tolist())

    def rows(self, count: int) -> StepRows:
        """The first rows."""
        rows = np.frombuffer(b"".join(self._rows[:count]), self._types)
        return StepRows(rows["ids"], rows["logprobs"], rows["rank"])

    def forget(self, count: int) -> None:
        """Let the first rows go, which are packed."""
        del self._rows[:count]


def _signs(types: np.dtype[np.void], *names: str) -> int:
    """The sign bits of some fields of a row, as one number."""
    row = np.zeros(1, types)
    for name in names:
        row[name] = (
            -np.array(0, np.float32) if types[name].base.kind == "f" else np.iinfo(types[name].base).min
        )
    return int.from_bytes(row.tobytes(), sys.byteorder)
