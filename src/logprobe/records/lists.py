"""`LogprobsLists`: the numbers of rows on the host, a step's or those of several sequences.

Before it: `LogprobsTensors`, or a producer of single positions. After it: the records of requests, messages,
and replies that want values.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.flat import FlatLogprobs
from logprobe.records.values import TokenLogprob, TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.store.columns import Array

LEAST_ROWS = 16  # that appending makes room for
COLUMNS = ("token_ids", "logprobs", "ranks", "lse", "num_logprobs", "is_valid")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLists:
    """Log-probabilities of ids that the caller named, any number a row, on the host."""

    offsets: Array  # (N + 1,) int64: row n owns entries [offsets[n], offsets[n + 1])
    token_ids: Array  # (M,) int32
    logprobs: Array  # (M,) float32, nats
    ranks: Array  # (M,) int32: 1 + number of strictly greater logits

    def rows(self, start: int, stop: int) -> GivenLists:
        """Rows [start, stop); shares memory."""
        offsets = self.offsets[start : stop + 1]
        entries = slice(int(offsets[0]), int(offsets[-1]))
        return GivenLists(
            offsets=offsets - offsets[0],
            token_ids=self.token_ids[entries],
            logprobs=self.logprobs[entries],
            ranks=self.ranks[entries],
        )

    @classmethod
    def joined(cls, parts: Sequence[LogprobsLists]) -> GivenLists:
        """The named ids of several parts of a step; a part without any has rows without any."""
        empty = [np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32)]
        columns = [empty if part.given is None else part.given.columns()[1:] for part in parts]
        counts = [
            np.zeros(part.total_tokens(), np.int64) if part.given is None else np.diff(part.given.offsets)
            for part in parts
        ]
        ids, logprobs, ranks = (np.concatenate(column) for column in zip(*columns, strict=True))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(counts))])
        return cls(offsets=offsets, token_ids=ids, logprobs=logprobs, ranks=ranks)

    def columns(self) -> list[Array]:
        """Offsets, ids, logprobs and ranks, as `FlatLogprobs.append_rows` takes them."""
        return [self.offsets, self.token_ids, self.logprobs, self.ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLists:
    """The ids that masks and truncation kept of each row's distribution, on the host."""

    offsets: Array  # (N + 1,) int64: row n owns entries [offsets[n], offsets[n + 1])
    token_ids: Array  # (M,) ascending within a row; the narrowest integers that hold the vocabulary

    @classmethod
    def of(cls, runs: Sequence[Array]) -> KeptLists:
        """One run of ids a row."""
        return cls(offsets=np.cumsum([0, *map(len, runs)]), token_ids=np.concatenate(runs))

    @classmethod
    def joined(cls, parts: Sequence[LogprobsLists]) -> KeptLists:
        """The kept ids of several parts of a step; a part without any has rows without any."""
        runs = [
            run
            for part in parts
            for run in (
                [np.empty(0, np.uint16)] * part.total_tokens() if part.kept is None else part.kept.runs()
            )
        ]
        return cls.of(runs)

    def runs(self) -> list[Array]:
        """The ids of each row."""
        return np.split(self.token_ids, self.offsets[1:-1])

    def rows(self, start: int, stop: int) -> KeptLists:
        """Rows [start, stop); shares no memory, so that one row does not keep a step."""
        offsets = self.offsets[start : stop + 1]
        ids = self.token_ids[int(offsets[0]) : int(offsets[-1])]
        return KeptLists(offsets=offsets - offsets[0], token_ids=ids.copy())


class LogprobsLists:
    """Rows of log-probabilities in host arrays, each as wide as its own k; any thread may append or read.

    The rows of a step stand one a sequence. Appended positions go to the end, whatever their sequence.
    """

    __slots__ = (
        "_lock", "_num_sequences", "_positions", "_sequences", "_size", "_texts",
        "entropy", "given", "is_valid", "kept", "log_kept_mass", "logprobs", "lse", "num_logprobs", "ranks",
        "token_ids",
    )  # fmt: skip

    token_ids: Array  # (N, k + 1) int32; row n holds num_logprobs[n] + 1 entries, column 0 the chosen token
    logprobs: Array  # (N, k + 1) float32, nats; float64 where positions are appended
    ranks: Array  # (N,) int32, of the chosen token: 1 + number of strictly greater logits
    lse: Array  # (N,) float32, log-sum-exp of the row's logits; NaN where it is not known
    num_logprobs: Array  # (N,) int32, k of each row
    is_valid: Array  # (N,) bool; False where the row held NaN or +inf, or nothing but -inf
    entropy: Array | None  # (N,) float32, nats; None where it was not asked for
    given: GivenLists | None  # ids that the caller named; None where there are none
    log_kept_mass: Array | None  # (N,) float32, nats, of processed rows; None where they are raw
    kept: KeptLists | None  # the ids that masks and truncation kept; None where they were not asked for

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
        self.entropy = self.given = self.log_kept_mass = self.kept = None

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
        entropy: Array | None = None,
        given: GivenLists | None = None,
        log_kept_mass: Array | None = None,
        kept: KeptLists | None = None,
    ) -> Self:
        """Wrap a step's arrays, one row a sequence; nothing is copied."""
        lists = cls.__new__(cls)  # each row of each step is one: no empty columns are made to be replaced
        lists._begin(len(ranks))  # noqa: SLF001 - of this class
        lists.token_ids, lists.logprobs, lists.ranks, lists.lse = token_ids, logprobs, ranks, lse
        lists.num_logprobs, lists.is_valid, lists.entropy, lists.given = (
            num_logprobs,
            is_valid,
            entropy,
            given,
        )
        lists.log_kept_mass, lists.kept = log_kept_mass, kept
        return lists

    @classmethod
    def joined(cls, parts: Sequence[LogprobsLists]) -> LogprobsLists:
        """The rows of several parts of a step, one after another; narrow parts are filled up with zeros."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.token_ids.shape[1] for part in parts)
        columns = {
            name: np.concatenate([_widened(getattr(part, name), width) for part in parts]) for name in COLUMNS
        }
        return cls.of_rows(
            **columns,
            entropy=_joined_numbers(parts, "entropy"),
            given=GivenLists.joined(parts) if any(part.given is not None for part in parts) else None,
            log_kept_mass=_joined_numbers(parts, "log_kept_mass"),
            kept=KeptLists.joined(parts) if any(part.kept is not None for part in parts) else None,
        )

    def _begin(self, num_rows: int) -> None:
        self._lock = Lock()
        self._num_sequences = self._size = num_rows
        self._sequences = self._positions = self._texts = None

    def in_sequences(self, rows: Array, num_sequences: int, num_positions: int) -> Self:
        """These rows of a step with `num_positions` positions a sequence, sequence after sequence."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        lists = self.of_rows(**columns, entropy=None if self.entropy is None else self.entropy[rows])
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

    def rows(self, start: int, stop: int, k: int) -> Self:
        """Rows [start, stop) of a step with `k` alternatives each.

        Memory is shared only where nothing is cut away, so that a narrow row never keeps a wide step.
        """
        own = slice(start, stop)
        ids, logprobs = self.token_ids[own, : k + 1], self.logprobs[own, : k + 1]
        if k + 1 < self.token_ids.shape[1]:
            ids, logprobs = ids.copy(), logprobs.copy()
        return self.of_rows(
            token_ids=ids,
            logprobs=logprobs,
            ranks=self.ranks[own],
            lse=self.lse[own],
            num_logprobs=self.num_logprobs[own],
            is_valid=self.is_valid[own],
            entropy=None if self.entropy is None else self.entropy[own],
            given=None if self.given is None else self.given.rows(start, stop),
            log_kept_mass=None if self.log_kept_mass is None else self.log_kept_mass[own],
            kept=None if self.kept is None else self.kept.rows(start, stop),
        )

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


def _joined_numbers(parts: Sequence[LogprobsLists], name: str) -> Array | None:
    """A column of one number a row; NaN in parts without it, None where no part has it."""
    columns = [getattr(part, name) for part in parts]
    if all(column is None for column in columns):
        return None
    return np.concatenate(
        [
            np.full(part.total_tokens(), np.nan, np.float32) if column is None else column
            for part, column in zip(parts, columns, strict=True)
        ]
    )


def _widened(column: Array, width: int) -> Array:
    if column.ndim == 1 or column.shape[1] == width:
        return column
    return np.pad(column, ((0, 0), (0, width - column.shape[1])))


def token_texts(token_ids: Sequence[int], tokenizer: Any = None) -> list[str]:
    """The text of each id: `<id>` without a tokenizer; one that can is asked for all at once."""
    if tokenizer is None:
        return [f"<{token_id}>" for token_id in token_ids]
    if hasattr(tokenizer, "batch_decode"):
        texts: list[str] = tokenizer.batch_decode([[token_id] for token_id in token_ids])
        return texts
    return [tokenizer.decode([token_id]) for token_id in token_ids]
