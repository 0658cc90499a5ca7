"""Containers for log-probabilities that are filled position by position, host copies, and callbacks.

The engine does not use them: its steps use `records.rows`, and its requests use `FlatLogprobs`.

Differences from the document that describes these names:

- `TopLogprobs`: has an additional field `rank` (0 if unknown)
- `LogprobsTensors`: the dense and the sparse form both keep the chosen token and its rank; the document's
  sparse form returns the likeliest token instead
- `LogprobsTensors(logprobs, token_ids, ...)`: accepts keyword arguments only. Each row holds the chosen token
  and the k likeliest. Store distributions over the whole vocabulary with `set_position`, and read them from
  `dense_logprobs`
- `to_lists()`: keeps arrays; `get_sequence(i)` creates the objects of sequence `i` only
- `AsyncCPUTransfer`: copies any tensor to the host: `transfer.submit_transfer(tensors.logprobs, step)`, then
  `transfer.get_result(step)`. An unknown id raises `KeyError`
- `SamplerOutput.top_k`: None without truncation; -1 in the document
- `collector._flush_locked(req_id)`: replaced by `flush(req_id)`; callbacks run outside the lock
- `extract_top_k_logprobs_rust`: returns log-probabilities, then ids;
  `logprobe.kernels.extract_top_k_logprobs` returns the ids first
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec
import numpy as np

from logprobe._lazy import lazy_names
from logprobe.errors import ParameterError
from logprobe.kernels.placement import like
from logprobe.records.flat import FlatLogprobs
from logprobe.records.rows import EXTRAS, GivenLists, host_array, on_host
from logprobe.records.values import top_indices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    import torch
    from torch import Tensor

    from logprobe.compat.collector import StreamingLogprobsCollector
    from logprobe.compat.extraction import batch_logprobs_to_cpu_rust, extract_top_k_logprobs_rust
    from logprobe.records.rows import Column, DeviceRows, GivenLogprobs
    from logprobe.transport.copy import AsyncCPUTransfer

    Array: TypeAlias = npt.NDArray[Any]

__all__ = [
    "AsyncCPUTransfer",
    "LogprobsLists",
    "LogprobsTensors",
    "ModelRunnerOutput",
    "SamplerOutput",
    "StreamingLogprobsCollector",
    "TokenLogprob",
    "TopLogprobs",
    "batch_logprobs_to_cpu_rust",
    "extract_top_k_logprobs_rust",
]

# Imported on first use, because the modules need kernels, threads or asyncio.
_HOMES = {
    "AsyncCPUTransfer": "logprobe.transport.copy",
    "StreamingLogprobsCollector": "logprobe.compat.collector",
    "batch_logprobs_to_cpu_rust": "logprobe.compat.extraction",
    "extract_top_k_logprobs_rust": "logprobe.compat.extraction",
}
MIN_ROWS = 16  # rows that the first append to a container allocates
COLUMNS = ("token_ids", "logprobs", "ranks", "lse", "num_logprobs", "is_valid")


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token and its log-probability (nats); instances sort by descending log-probability."""

    token_id: int
    token: str
    logprob: float

    def __lt__(self, other: TokenLogprob) -> bool:
        return self.logprob > other.logprob


class TopLogprobs(msgspec.Struct, frozen=True):
    """The chosen token at one position with its rank, and the k most likely tokens in descending order."""

    position: int
    token_id: int
    token: str
    logprob: float
    top_k: list[TokenLogprob] = []
    rank: int = 0  # 1-based; 0 if not known

    @classmethod
    def from_array(
        cls,
        position: int,
        logprobs: npt.ArrayLike | Tensor,
        token_ids: npt.ArrayLike | Tensor,
        tokens: Sequence[str | None] | None,
        selected_idx: int,
        k: int = 5,
    ) -> TopLogprobs:
        """Create an instance from one row of n candidates.

        Ties are ordered by ascending token id. The rank is 1 + the number of candidates with greater
        logprobs.

        Args:
            position: index of the token in its sequence.
            logprobs: log-probabilities of the candidates, (n,) nats.
            token_ids: token ids of the candidates, (n,) integers.
            tokens: up to n texts; a missing text becomes `<id>`.
            selected_idx: index of the chosen token among the candidates.
            k: number of alternatives to keep; `k >= n` keeps all.

        Raises:
            ParameterError: the shapes differ, a value is NaN or +inf, or k or selected_idx is out of range.
        """
        values, ids = host_array(logprobs), host_array(token_ids)
        _check_candidates(values, ids, selected_idx, k)
        best = top_indices(values, k, ids)
        texts = tokens or ()

        def text(index: int) -> str:
            given = texts[index] if index < len(texts) else None
            return f"<{int(ids[index])}>" if given is None else given

        return cls(
            position=position,
            token_id=int(ids[selected_idx]),
            token=text(selected_idx),
            logprob=float(values[selected_idx]),
            top_k=[
                TokenLogprob(int(ids[index]), text(index), float(values[index])) for index in best.tolist()
            ],
            rank=1 + int(np.count_nonzero(values > values[selected_idx])),
        )


def _check_candidates(values: npt.NDArray[Any], ids: npt.NDArray[Any], selected_idx: int, k: int) -> None:
    if values.ndim != 1 or ids.shape != values.shape:
        raise ParameterError(
            "token_ids", f"logprobs {values.shape} and token_ids {ids.shape} must be 1-D and equally long"
        )
    if not 0 <= selected_idx < len(values):
        raise ParameterError("selected_idx", f"{selected_idx} is out of range for {len(values)} candidates")
    if k < 0:
        raise ParameterError("k", f"must be >= 0, got {k}; 0 keeps only the chosen token")
    if np.isnan(values).any() or np.isposinf(values).any():
        raise ParameterError("logprobs", "a candidate is NaN or +inf; mask or drop the row first")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsTensors:
    """Log-probabilities of the chosen token (column 0) and the k most likely tokens, one row per position.

    With several positions per sequence (`create_empty`), position p of sequence b is row b * max_seq_len + p.
    The fields are NumPy arrays, or torch tensors if the rows are on a device.
    """

    token_ids: Column  # (B, k + 1) int32; row b has num_logprobs[b] + 1 entries, the others are undefined
    logprobs: Column  # (B, k + 1) float32, nats
    ranks: Column  # (B,) int32, of the chosen token: 1 + number of strictly greater logits
    lse: Column  # (B,) float32, log-sum-exp of the row's logits
    num_logprobs: Column  # (B,) int32, k of each row
    is_valid: Column  # (B,) bool; False where the logits had NaN or +inf, or only -inf
    extras: Mapping[str, Column] = field(default_factory=dict)  # (B,) each; requested columns from EXTRAS
    given: GivenLogprobs | None = None
    max_seq_len: int = 1  # rows per sequence
    is_set: Column | None = None  # (B,) bool, True for rows that have been set; None if all have
    dense_logprobs: Column | None = None  # (B, V) float32, whole rows in nats; None if sparse

    def __repr__(self) -> str:
        return f"<LogprobsTensors: {len(self.ranks)} rows, k = {self.token_ids.shape[1] - 1}>"

    @property
    def entropy(self) -> Column | None:
        """(B,) float32, nats; None if not requested."""
        return self.extras.get("entropy")

    @property
    def is_sparse(self) -> bool:
        """False if rows also have the log-probabilities of the whole vocabulary."""
        return self.dense_logprobs is None

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.ranks) // self.max_seq_len

    @property
    def seq_lens(self) -> list[int]:
        """Number of positions of each sequence, up to the last position that was set."""
        is_set = self._set_rows().reshape(-1, max(self.max_seq_len, 1))
        return [int(places[-1]) + 1 if len(places := np.flatnonzero(row)) else 0 for row in is_set]

    @property
    def top_k(self) -> int:
        """Maximum number of alternatives per row."""
        return self.token_ids.shape[1] - 1

    @classmethod
    def of(cls, rows: DeviceRows) -> LogprobsTensors:
        """Wrap the output of a kernel, which has one row per sequence, without copying."""
        return cls(
            token_ids=rows.token_ids,
            logprobs=rows.logprobs,
            ranks=rows.ranks,
            lse=rows.lse,
            num_logprobs=rows.num_logprobs,
            is_valid=rows.is_valid,
            extras=rows.extras,
            given=rows.given,
        )

    @classmethod
    def create_empty(
        cls,
        batch_size: int,
        max_seq_len: int,
        vocab_size: int,
        top_k: int = 5,
        sparse: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> LogprobsTensors:
        """Allocate `max_seq_len` positions per sequence, to be filled with `set_position`.

        They are NumPy arrays, or torch tensors on `device` if it is given.

        Raises:
            ParameterError: a size is negative, or `vocab_size` is 0.
        """
        sizes = {"batch_size": batch_size, "max_seq_len": max_seq_len, "top_k": top_k}
        for name, size in {**sizes, "vocab_size": vocab_size - 1}.items():
            if size < 0:
                raise ParameterError(name, "is too small; vocab_size must be >= 1, the other sizes >= 0")
        num_rows, width = batch_size * max_seq_len, min(top_k, vocab_size) + 1
        columns: dict[str, Any] = {
            "token_ids": np.zeros((num_rows, width), np.int32),
            "logprobs": np.full((num_rows, width), -np.inf, np.float32),
            "ranks": np.zeros(num_rows, np.int32),
            "lse": np.zeros(num_rows, np.float32),
            "num_logprobs": np.full(num_rows, width - 1, np.int32),
            "is_valid": np.zeros(num_rows, np.bool_),
            "is_set": np.zeros(num_rows, np.bool_),
        }
        # Not initialized, since untouched pages use no memory; `is_set` marks the rows with values.
        dense: Any = None if sparse or device is not None else np.empty((num_rows, vocab_size), np.float32)
        if device is not None:
            import torch

            columns = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
            dense = None if sparse else torch.empty((num_rows, vocab_size), device=device)
        return cls(**columns, dense_logprobs=dense, max_seq_len=max_seq_len)

    def set_position(
        self, batch_idx: int, position: int, logprobs: npt.ArrayLike | Tensor, token_id: int
    ) -> None:
        """Store one row of log-probabilities, (V,) nats on any device, and its chosen token.

        A row with NaN, or only -inf, is marked as invalid (`is_valid`).

        Raises:
            ParameterError: an index or id is out of range, the row has a different width, or a value is +inf.
        """
        row = self._row_of(batch_idx, position)
        values = np.asarray(host_array(logprobs), np.float32)
        self._check_row(values, token_id)
        is_valid = bool(np.isfinite(values).any() and not np.isnan(values).any())
        best = top_indices(values, int(self.num_logprobs[row]) if is_valid else 0)
        columns = np.array([token_id, *best], np.int32)
        entries = values[columns] if is_valid else np.full(len(columns), np.nan, np.float32)
        self.token_ids[row, : len(columns)] = like(columns, self.token_ids)
        self.logprobs[row, : len(columns)] = like(entries, self.logprobs)
        self.ranks[row] = 1 + int(np.count_nonzero(values > values[token_id])) if is_valid else 0
        self.lse[row] = float(np.log(np.exp(values, dtype=np.float64).sum())) if is_valid else float("nan")
        self.is_valid[row] = is_valid
        if self.dense_logprobs is not None:
            self.dense_logprobs[row] = like(values, self.dense_logprobs)
        if self.is_set is not None:
            self.is_set[row] = True

    def to_lists(self, tokenizer: Any = None) -> LogprobsLists:
        """Copy the positions set so far to the host, sequence by sequence, with token texts from `tokenizer`.

        From a GPU, all arrays are copied at once. An invalid row stays at its position: its log-probability
        is NaN, its rank 0 and its list of alternatives empty.
        """
        return self._as_lists(on_host(list(self._parts().values())), tokenizer)

    def _parts(self) -> dict[str, Column]:
        parts: dict[str, Column] = {name: getattr(self, name) for name in COLUMNS} | dict(self.extras)
        if self.given is not None:
            for name in ("offsets", "token_ids", "logprobs", "ranks"):
                parts[f"given.{name}"] = getattr(self.given, name)
        return parts

    def _as_lists(self, values: Sequence[Array], tokenizer: Any) -> LogprobsLists:
        arrays: dict[str, Any] = dict(zip(self._parts(), values, strict=True))
        given = {name[6:]: arrays.pop(name) for name in list(arrays) if name.startswith("given.")}
        lists = LogprobsLists.of_rows(**arrays, given=GivenLists(**given) if given else None)
        if self.is_set is not None or self.max_seq_len != 1:
            lists = lists.in_sequences(np.flatnonzero(self._set_rows()), self.batch_size, self.max_seq_len)
        return lists if tokenizer is None else lists.with_texts(tokenizer)

    def latest(self, batch_idx: int, tokenizer: Any = None) -> TopLogprobs | None:
        """Return the last position that was set in one sequence, or None; other sequences are not read."""
        first = self._row_of(batch_idx, 0) if self.max_seq_len else 0
        rows = np.flatnonzero(self._set_rows()[first : first + self.max_seq_len])
        return self._top_of(first + int(rows[-1]), tokenizer) if len(rows) else None

    def _row_of(self, batch_idx: int, position: int) -> int:
        if not 0 <= batch_idx < self.batch_size:
            raise ParameterError("batch_idx", f"{batch_idx} is out of range for {self.batch_size} sequences")
        if not 0 <= position < self.max_seq_len:
            raise ParameterError("position", f"{position} is out of range for {self.max_seq_len} positions")
        return batch_idx * self.max_seq_len + position

    def _check_row(self, values: Array, token_id: int) -> None:
        width = values.shape[-1] if self.dense_logprobs is None else self.dense_logprobs.shape[1]
        if values.shape != (width,) or not width:
            raise ParameterError("logprobs", f"must have the shape ({width},), got {values.shape}")
        if not 0 <= token_id < width:
            raise ParameterError("token_id", f"{token_id} is out of range for a vocabulary of {width}")
        if np.isposinf(values).any():
            raise ParameterError(
                "logprobs", "a value is +inf, which is not a log-probability; check the logits"
            )

    def _set_rows(self) -> Array:
        return np.ones(len(self.ranks), np.bool_) if self.is_set is None else host_array(self.is_set)

    def _top_of(self, row: int, tokenizer: Any) -> TopLogprobs:
        k = int(self.num_logprobs[row]) if self.is_valid[row] else 0
        ids = self.token_ids[row, : k + 1].tolist()
        logprobs = self.logprobs[row, : k + 1].tolist()
        texts = _token_texts(ids, tokenizer)
        return TopLogprobs(
            position=row % self.max_seq_len,
            token_id=ids[0],
            token=texts[0],
            logprob=logprobs[0],
            top_k=[TokenLogprob(*entry) for entry in zip(ids[1:], texts[1:], logprobs[1:], strict=True)],
            rank=int(self.ranks[row]),
        )


class LogprobsLists:
    """Rows of log-probabilities in host arrays, each with its own k; thread-safe.

    The result of a step has one row per sequence. Appended positions, of any sequence, become the last rows.
    """

    __slots__ = (
        "_lock", "_num_sequences", "_positions", "_sequences", "_size", "_texts",
        "extras", "given", "is_valid", "logprobs", "lse", "num_logprobs", "ranks", "token_ids",
    )  # fmt: skip

    token_ids: Array  # (N, k + 1) int32; row n has num_logprobs[n] + 1 entries, column 0 is the chosen token
    logprobs: Array  # (N, k + 1) float32, nats; float64 if positions are appended
    ranks: Array  # (N,) int32, of the chosen token: 1 + number of strictly greater logits
    lse: Array  # (N,) float32, log-sum-exp of the row's logits; NaN if unknown
    num_logprobs: Array  # (N,) int32, k of each row
    is_valid: Array  # (N,) bool; False where the logits had NaN or +inf, or only -inf
    extras: dict[str, Array]  # (N,) each; available columns from EXTRAS
    given: GivenLists | None  # caller-specified token ids; None if there are none

    def __init__(self, num_sequences: int = 1) -> None:
        if num_sequences < 0:
            raise ParameterError("num_sequences", f"must be >= 0, got {num_sequences}")
        self._lock = Lock()
        self._num_sequences = num_sequences
        self._size = 0
        self._sequences: Array | None = np.zeros(0, np.int64)  # (N,); None means row n is sequence n
        self._positions: Array | None = np.zeros(0, np.int64)  # (N,); None means all are 0
        self._texts: list[list[str]] | None = []  # texts of each row's entries; None means `<id>`
        self.token_ids, self.logprobs = np.zeros((0, 1), np.int32), np.zeros((0, 1))
        self.ranks, self.lse = np.zeros(0, np.int32), np.zeros(0, np.float32)
        self.num_logprobs, self.is_valid = np.zeros(0, np.int32), np.zeros(0, np.bool_)
        self.extras, self.given = {}, None

    def __getattr__(self, name: str) -> Array | None:
        """Return a column named in EXTRAS; None if it was not requested."""
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
        """Wrap the arrays of a step, which have one row per sequence, without copying."""
        lists = cls(len(ranks))
        lists._size = lists._num_sequences
        lists._sequences = lists._positions = lists._texts = None
        lists.token_ids, lists.logprobs, lists.ranks, lists.lse = token_ids, logprobs, ranks, lse
        lists.num_logprobs, lists.is_valid, lists.given = num_logprobs, is_valid, given
        lists.extras = {name: column for name, column in extras.items() if column is not None}
        return lists

    def in_sequences(self, rows: Array, num_sequences: int, num_positions: int) -> Self:
        """Return selected rows, ordered by sequence, of arrays with `num_positions` rows per sequence."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        lists = self.of_rows(**columns)
        lists.extras = {name: column[rows] for name, column in self.extras.items()}
        lists._place(num_sequences, *np.divmod(rows, max(num_positions, 1)))  # noqa: SLF001 - same class
        return lists

    def _place(self, num_sequences: int, sequences: Array, positions: Array) -> None:
        self._num_sequences, self._sequences, self._positions = num_sequences, sequences, positions

    def with_texts(self, tokenizer: Any) -> Self:
        """Set the texts of all tokens, decoded in one call of the tokenizer, and return self."""
        counts = np.where(self.is_valid, self.num_logprobs, 0)[: self._size] + 1
        ids = [row[:count] for row, count in zip(self.token_ids.tolist(), counts.tolist(), strict=False)]
        texts = iter(_token_texts([token_id for row in ids for token_id in row], tokenizer))
        self._texts = [[next(texts) for _ in row] for row in ids]
        return self

    def append(self, seq_idx: int, logprobs: TopLogprobs) -> None:
        """Append a position to a sequence; if `seq_idx` is beyond the last sequence, sequences are added.

        Raises:
            ParameterError: the sequence index is negative.
        """
        if seq_idx < 0:
            raise ParameterError("seq_idx", f"must be >= 0, got {seq_idx}")
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
        """Return one sequence's positions in insertion order; an empty list beyond the last sequence."""
        with self._lock:
            return [self._top_of(row) for row in self._rows_of(seq_idx)]

    def get_all(self) -> list[list[TopLogprobs]]:
        """Return the positions of every sequence."""
        return [self.get_sequence(seq_idx) for seq_idx in range(len(self))]

    def latest(self, seq_idx: int) -> TopLogprobs | None:
        """Return the last position of one sequence, or None; no other position is read."""
        with self._lock:
            rows = self._rows_of(seq_idx)
            return self._top_of(rows[-1]) if rows else None

    def slice_request(self, row: int) -> FlatLogprobs:
        """Convert the sequence with index `row` to a record; each position keeps its own k.

        Raises:
            ParameterError: `row` is out of range.
        """
        if not 0 <= row < len(self):
            raise ParameterError("row", f"{row} is out of range for {len(self)} sequences")
        record = FlatLogprobs()
        with self._lock:
            for place in self._rows_of(row):
                top = self._top_of(place)
                entries = [TokenLogprob(top.token_id, top.token, top.logprob), *top.top_k]
                texts = None if self._texts is None else [entry.token for entry in entries]
                record.append_fast(
                    [entry.token_id for entry in entries],
                    [entry.logprob for entry in entries],
                    [top.rank or None, *range(1, len(entries))],
                    texts or [None] * len(entries),
                )
        return record

    def __len__(self) -> int:
        return self._num_sequences

    def total_tokens(self) -> int:
        """Return the total number of positions in all sequences."""
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
        texts = _token_texts(ids) if self._texts is None else self._texts[row]
        position = 0 if self._positions is None else int(self._positions[row])
        top = [TokenLogprob(*entry) for entry in zip(ids[1:], texts[1:], logprobs[1:], strict=True)]
        return TopLogprobs(position, ids[0], texts[0], logprobs[0], top, int(self.ranks[row]))

    def _make_room(self, width: int) -> int:
        """Return the index of the next free row, and make sure that it has `width` columns.

        Full arrays grow by half.
        """
        size, old_width = self._size, self.token_ids.shape[1]
        if size == len(self.ranks) or width > old_width:
            length = max(MIN_ROWS, size * 3 // 2 + 1) if size == len(self.ranks) else len(self.ranks)
            for name in (*COLUMNS, "_sequences", "_positions"):
                column = getattr(self, name)
                shape = (length, max(width, old_width)) if column.ndim == 2 else (length,)
                grown = np.zeros(shape, column.dtype)
                grown[tuple(map(slice, column.shape))] = column
                setattr(self, name, grown)
        return size


def _token_texts(token_ids: Sequence[int], tokenizer: Any = None) -> list[str]:
    """Return the text of each id, or `<id>` without a tokenizer; `batch_decode` is used if available."""
    if tokenizer is None:
        return [f"<{token_id}>" for token_id in token_ids]
    if hasattr(tokenizer, "batch_decode"):
        texts: list[str] = tokenizer.batch_decode([[token_id] for token_id in token_ids])
        return texts
    return [tokenizer.decode([token_id]) for token_id in token_ids]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Tokens sampled in one step, one row per sequence.

    If only some rows have log-probabilities, `logprobs_rows` maps each row to its index in `logprobs`, or -1.
    """

    sampled_token_ids: Any  # (B,) or (B, n) integers; lists and tensors are converted to a host array
    logprobs: LogprobsLists | LogprobsTensors | None = None  # raw log-probabilities; None if not requested
    prompt_logprobs: Sequence[FlatLogprobs | None] | None = None  # B records
    num_samples: int = 1
    temperature: float | Array = 1.0  # for all rows, or (B,)
    top_p: float | Array = 1.0
    top_k: int | Array | None = None  # None for no truncation
    spec_decode_accepted: Array | None = None  # (B,) integers, numbers of accepted draft tokens
    logprobs_rows: Array | None = None  # (B,) integers; None if row b is row b of `logprobs`
    processed_logprobs: LogprobsLists | None = None  # for the distribution that tokens were sampled from
    processed_rows: Array | None = None  # (B,) integers, as `logprobs_rows`
    is_valid: Array | None = None  # (B,) bool; False where the logits had NaN or +inf, or only -inf
    whole_rows: dict[int, Array] = field(default_factory=dict)  # row → distribution, (V,) nats, read-only

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampled_token_ids", _integers(self.sampled_token_ids))

    def __repr__(self) -> str:
        reported = "no logprobs" if self.logprobs is None else repr(self.logprobs)
        return f"<SamplerOutput: {self.batch_size} sequences, {reported}>"

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return int(self.sampled_token_ids.shape[0])

    def get_token_ids(self, batch_idx: int) -> Array:
        """Return the token ids sampled for one sequence, (n,).

        Raises:
            ParameterError: `batch_idx` is out of range.
        """
        if not 0 <= batch_idx < self.batch_size:
            raise ParameterError("batch_idx", f"{batch_idx} is out of range for {self.batch_size} sequences")
        return np.atleast_1d(self.sampled_token_ids[batch_idx])


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The tokens that one step sampled for each request, and the time and memory that the step used."""

    sampler_output: SamplerOutput
    req_ids: list[str]  # row b belongs to req_ids[b]
    req_id_to_index: dict[str, int] = field(default_factory=dict)
    hidden_states: Any = None  # (B, hidden size), if requested
    forward_time_ns: int = 0
    sample_time_ns: int = 0
    peak_memory_bytes: int = 0

    def __repr__(self) -> str:
        return f"<ModelRunnerOutput: {len(self.req_ids)} requests, {self.sampler_output!r}>"

    @classmethod
    def create(
        cls,
        sampled_token_ids: npt.ArrayLike,
        req_ids: Sequence[str],
        logprobs: LogprobsTensors | LogprobsLists | None = None,
    ) -> ModelRunnerOutput:
        """Create an instance from tokens, (B,) or (B, n), and one request id per row.

        Raises:
            ParameterError: rows have different lengths, token ids are not integers, the numbers of requests
                and rows differ, or a request occurs twice.
        """
        ids = _integers(sampled_token_ids)
        index = {req_id: row for row, req_id in enumerate(req_ids)}
        if ids.ndim not in {1, 2} or not len(index) == len(req_ids) == len(ids):
            raise ParameterError(
                "req_ids",
                f"has {len(req_ids)} ids ({len(index)} unique) for token ids of shape {ids.shape}; "
                "give one unique id per row",
            )
        output = SamplerOutput(
            sampled_token_ids=ids, logprobs=logprobs, num_samples=ids.shape[1] if ids.ndim == 2 else 1
        )
        return cls(sampler_output=output, req_ids=list(req_ids), req_id_to_index=index)

    def get_output_for_request(self, req_id: str) -> tuple[Array, TopLogprobs | None] | None:
        """Return the token ids (n,) of one request and its latest log-probabilities.

        Return None for unknown requests. Only the row of this request is read.
        """
        row = self.req_id_to_index.get(req_id)
        if row is None:
            return None
        output = self.sampler_output
        place = row if output.logprobs_rows is None else int(output.logprobs_rows[row])
        logprobs = None if output.logprobs is None or place < 0 else output.logprobs.latest(place)
        return output.get_token_ids(row), logprobs


def _integers(token_ids: npt.ArrayLike | Tensor) -> Array:
    try:
        ids = host_array(token_ids)
    except ValueError as error:
        raise ParameterError(
            "sampled_token_ids", "rows have different lengths; give the same number of tokens per row"
        ) from error
    if ids.size and ids.dtype.kind not in "iu":
        raise ParameterError("sampled_token_ids", f"must be integers, got {ids.dtype}")
    return ids


__getattr__ = lazy_names(__name__, _HOMES)
