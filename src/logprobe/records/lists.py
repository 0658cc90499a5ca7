"""`LogprobsLists`: the numbers of several sequences on the host, position by position.

Before it: `LogprobsTensors`, or a producer of single positions. After it: user code.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.flat import FlatLogprobs
from logprobe.records.rows import EXTRAS
from logprobe.records.values import TokenLogprob, TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.rows import GivenLists
    from logprobe.records.store.columns import Array

LEAST_ROWS = 16  # that appending makes room for
COLUMNS = ("token_ids", "logprobs", "ranks", "lse", "num_logprobs", "is_valid")


class LogprobsLists:
    """Rows of log-probabilities in host arrays, each as wide as its own k; any thread may append or read.

    The rows of a step stand one a sequence. Appended positions go to the end, whatever their sequence.
    """

    __slots__ = (
        "_lock", "_num_sequences", "_positions", "_sequences", "_size", "_texts",
        "extras", "given", "is_valid", "logprobs", "lse", "num_logprobs", "ranks", "token_ids",
    )  # fmt: skip

    token_ids: Array  # (N, k + 1) int32; row n holds num_logprobs[n] + 1 entries, column 0 the chosen token
    logprobs: Array  # (N, k + 1) float32, nats; float64 where positions are appended
    ranks: Array  # (N,) int32, of the chosen token: 1 + number of strictly greater logits
    lse: Array  # (N,) float32, log-sum-exp of the row's logits; NaN where it is not known
    num_logprobs: Array  # (N,) int32, k of each row
    is_valid: Array  # (N,) bool; False where the row held NaN or +inf, or nothing but -inf
    extras: dict[str, Array]  # (N,) each, the columns of EXTRAS that there are
    given: GivenLists | None  # ids that the caller named; None where there are none

    def __init__(self, num_sequences: int = 1) -> None:
        if num_sequences < 0:
            raise ParameterError("num_sequences", f"{num_sequences} is negative")
        self._lock = Lock()
        self._num_sequences = num_sequences
        self._size = 0
        self._sequences: Array | None = np.zeros(0, np.int64)  # (N,); None: row n is sequence n
        self._positions: Array | None = np.zeros(0, np.int64)  # (N,); None: all are 0
        self._texts: list[list[str]] | None = []  # of each row's entries; None: `<id>`
        self.token_ids, self.logprobs = np.zeros((0, 1), np.int32), np.zeros((0, 1))
        self.ranks, self.lse = np.zeros(0, np.int32), np.zeros(0, np.float32)
        self.num_logprobs, self.is_valid = np.zeros(0, np.int32), np.zeros(0, np.bool_)
        self.extras, self.given = {}, None

    def __getattr__(self, name: str) -> Array | None:
        """A column of EXTRAS; None where it was not asked for."""
        if name in EXTRAS:
            return self.extras.get(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<LogprobsLists: {self._size} rows, k = {self.token_ids.shape[1] - 1}>"

    @classmethod
    def of_rows(
        cls,
        *,
        token_ids: Array,
        logprobs: Array,
        ranks: Array,
        lse: Array,
        num_logprobs: Array,
        is_valid: Array,
        given: GivenLists | None = None,
        **extras: Array | None,
    ) -> Self:
        """Wrap a step's arrays, one row a sequence; nothing is copied."""
        lists = cls(len(ranks))
        lists._size = lists._num_sequences
        lists._sequences = lists._positions = lists._texts = None
        lists.token_ids, lists.logprobs, lists.ranks, lists.lse = token_ids, logprobs, ranks, lse
        lists.num_logprobs, lists.is_valid, lists.given = num_logprobs, is_valid, given
        lists.extras = {name: column for name, column in extras.items() if column is not None}
        return lists

    def in_sequences(self, rows: Array, num_sequences: int, num_positions: int) -> Self:
        """These rows of a step with `num_positions` positions a sequence, sequence after sequence."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        lists = self.of_rows(**columns)
        lists.extras = {name: column[rows] for name, column in self.extras.items()}
        lists._place(num_sequences, *np.divmod(rows, max(num_positions, 1)))  # noqa: SLF001 - of this class
        return lists

    def _place(self, num_sequences: int, sequences: Array, positions: Array) -> None:
        self._num_sequences, self._sequences, self._positions = num_sequences, sequences, positions

    def with_texts(self, tokenizer: Any) -> Self:
        """The same rows with the texts of their tokens, all decoded in one call."""
        counts = np.where(self.is_valid, self.num_logprobs, 0)[: self._size] + 1
        ids = [row[:count] for row, count in zip(self.token_ids.tolist(), counts.tolist(), strict=False)]
        texts = iter(token_texts([token_id for row in ids for token_id in row], tokenizer))
        self._texts = [[next(texts) for _ in row] for row in ids]
        return self

    def append(self, seq_idx: int, logprobs: TopLogprobs) -> None:
        """Add a position to a sequence; a sequence beyond the last makes room up to it.

        Raises:
            ParameterError: a negative sequence index.
        """
        if seq_idx < 0:
            raise ParameterError("seq_idx", f"{seq_idx} is negative")
        entries = [TokenLogprob(logprobs.token_id, logprobs.token, logprobs.logprob), *logprobs.top_k]
        with self._lock:
            row = self._make_room(len(entries))
            assert self._sequences is not None
            assert self._positions is not None
            assert self._texts is not None
            self._sequences[row], self._positions[row] = seq_idx, logprobs.position
            self.token_ids[row, : len(entries)] = [entry.token_id for entry in entries]
            self.logprobs[row, : len(entries)] = [entry.logprob for entry in entries]
            self.ranks[row], self.lse[row] = logprobs.rank, np.nan
            self.num_logprobs[row], self.is_valid[row] = len(entries) - 1, True
            self._texts.append([entry.token for entry in entries])
            self._num_sequences = max(self._num_sequences, seq_idx + 1)
            self._size = row + 1

    def get_sequence(self, seq_idx: int) -> list[TopLogprobs]:
        """Positions of one sequence in the order in which they came; empty beyond the last sequence."""
        with self._lock:
            return [self._top_of(row) for row in self._rows_of(seq_idx)]

    def get_all(self) -> list[list[TopLogprobs]]:
        """Positions of every sequence."""
        return [self.get_sequence(seq_idx) for seq_idx in range(len(self))]

    def latest(self, seq_idx: int) -> TopLogprobs | None:
        """The last position of one sequence, None where there is none; no other position is read."""
        with self._lock:
            rows = self._rows_of(seq_idx)
            return self._top_of(rows[-1]) if rows else None

    def slice_request(self, row: int) -> FlatLogprobs:
        """One sequence as a record, each position as wide as its own k.

        Raises:
            ParameterError: no such sequence.
        """
        if not 0 <= row < len(self):
            raise ParameterError("row", f"{row} lies outside the {len(self)} sequences")
        record = FlatLogprobs()
        with self._lock:
            for place in self._rows_of(row):
                top = self._top_of(place)
                entries = [TokenLogprob(top.token_id, top.token, top.logprob), *top.top_k]
                texts = None if self._texts is None else [entry.token for entry in entries]
                record.append_fast(
                    [entry.token_id for entry in entries],
                    [entry.logprob for entry in entries],
                    [top.rank, *range(1, len(entries))],
                    texts or [None] * len(entries),
                )
        return record

    def __len__(self) -> int:
        return self._num_sequences

    def total_tokens(self) -> int:
        """Number of positions of all sequences."""
        return self._size

    def _rows_of(self, seq_idx: int) -> list[int]:
        if not 0 <= seq_idx < self._num_sequences:
            return []
        if self._sequences is None:
            return [seq_idx]
        rows: list[int] = np.flatnonzero(self._sequences[: self._size] == seq_idx).tolist()
        return rows

    def _top_of(self, row: int) -> TopLogprobs:
        k = int(self.num_logprobs[row]) if self.is_valid[row] else 0
        ids: list[int] = self.token_ids[row, : k + 1].tolist()
        logprobs: list[float] = self.logprobs[row, : k + 1].tolist()
        texts = token_texts(ids) if self._texts is None else self._texts[row]
        position = 0 if self._positions is None else int(self._positions[row])
        top = [TokenLogprob(*entry) for entry in zip(ids[1:], texts[1:], logprobs[1:], strict=True)]
        return TopLogprobs(position, ids[0], texts[0], logprobs[0], int(self.ranks[row]), top)

    def _make_room(self, width: int) -> int:
        """The next free row, with columns for `width` entries; arrays grow by half again."""
        size, old_width = self._size, self.token_ids.shape[1]
        if size == len(self.ranks) or width > old_width:
            length = max(LEAST_ROWS, size * 3 // 2 + 1) if size == len(self.ranks) else len(self.ranks)
            for name in (*COLUMNS, "_sequences", "_positions"):
                column = getattr(self, name)
                shape = (length, max(width, old_width)) if column.ndim == 2 else (length,)
                grown = np.zeros(shape, column.dtype)
                grown[tuple(map(slice, column.shape))] = column
                setattr(self, name, grown)
        return size


def token_texts(token_ids: Sequence[int], tokenizer: Any = None) -> list[str]:
    """The text of each id: `<id>` without a tokenizer; one that can is asked for all at once."""
    if tokenizer is None:
        return [f"<{token_id}>" for token_id in token_ids]
    if hasattr(tokenizer, "batch_decode"):
        texts: list[str] = tokenizer.batch_decode([[token_id] for token_id in token_ids])
        return texts
    return [tokenizer.decode([token_id]) for token_id in token_ids]
