"""Processors that record whole rows without changing them, for selected requests or for all."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from logprobe.errors import require
from logprobe.kernels.extraction.api import extract
from logprobe.kernels.extraction.requests import dtype_of
from logprobe.kernels.placement import as_rows, as_tensor, copied, like
from logprobe.processors.arguments import CaptureArgs, NoArgs
from logprobe.processors.batch import BatchState, as_batch
from logprobe.processors.interface import LogitsProcessor
from logprobe.records.rows import host_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.config import EngineConfig

logger = logging.getLogger("logprobe")

FloatArray: TypeAlias = NDArray[np.float32]
Row = TypeVar("Row")
DEFAULT_MAX_BYTES = 256 << 20


@final
class CaptureLogitsProcessor(LogitsProcessor):
    """Records the log-softmax of every row of requests that set `capture`, without changing the logits.

    A recorded row includes the changes of processors that run earlier in the order, but not of those that run
    later. The store is bounded: the rows of the least recently captured request are dropped first. All
    methods are thread-safe. A row is stored completely or not at all, and is read-only.
    """

    Args = CaptureArgs
    keeps_rows = True

    def __init__(self, config: EngineConfig, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        del config
        self._max_bytes = _checked(max_bytes)
        self._lock = threading.Lock()
        # `_lock` guards these three: rows by name and position, rows of the latest step, and their size.
        self._rows: OrderedDict[str, dict[int, FloatArray]] = OrderedDict()
        self._last: list[FloatArray] = []
        self._num_bytes = 0
        # used on the engine thread only: (row of the logits, name, position)
        self._targets: list[tuple[int, str, int]] = []

    def is_argmax_invariant(self) -> bool:
        """Return True: nothing changes."""
        return True

    def update_state(self, batch_update: BatchState | None) -> None:
        """Remember the names and positions of the next rows; None means that the rows are unchanged."""
        if batch_update is None:
            return
        batch = as_batch(batch_update, CaptureArgs)
        self._targets = [
            (
                index,
                row.args.capture if isinstance(row.args.capture, str) else row.name,
                len(row.output_token_ids),
            )
            for index, row in enumerate(batch.rows)
            if row.args.capture
        ]

    def apply(self, logits: Any) -> Any:
        """Store the rows and return the logits unchanged."""
        if not self._targets:
            return logits
        part = logits[[index for index, _, _ in self._targets]]
        rows = [row.astype(np.float32) for row in host_array(_log_softmax(part))]  # copies
        with self._lock:
            self._last = rows
            for (_, name, position), row in zip(self._targets, rows, strict=True):
                self._keep(name, position, row)
            self._drop_oldest()
        return logits

    def get_logprobs(self, batch_index: int = 0) -> FloatArray | None:
        """Return one row captured in the latest step, (V,) nats; None if the index is out of range.

        `batch_index` counts captured rows only; -1 is the last one.
        """
        with self._lock:
            return _at(self._last, batch_index)

    def get_all_logprobs(self) -> FloatArray | None:
        """Return all n rows captured in the latest step, (n, V) nats; None if there are none."""
        with self._lock:
            last = self._last
        return np.stack(last) if last else None

    def get_rows(self, name: str) -> dict[int, FloatArray]:
        """Return a map from the number of preceding output tokens to the row, (V,) nats.

        `name` is the string that the request set as `capture`. If it set True, `name` is the request's id,
        followed by `#` and the sample's index unless the index is 0.
        """
        with self._lock:
            return dict(self._rows.get(name, {}))

    def names(self) -> list[str]:
        """Return the names under which rows are stored (see `get_rows`), least recently captured first."""
        with self._lock:
            return list(self._rows)

    def clear(self) -> None:
        """Delete all rows."""
        with self._lock:
            self._rows.clear()
            self._last, self._num_bytes = [], 0

    def _keep(self, name: str, position: int, row: FloatArray) -> None:
        row.flags.writeable = False
        positions = self._rows.setdefault(name, {})
        self._rows.move_to_end(name)
        self._num_bytes += row.nbytes - _num_bytes(positions.get(position))
        positions[position] = row

    def _drop_oldest(self) -> None:
        while self._num_bytes > self._max_bytes and self._rows:
            name, positions = next(iter(self._rows.items()))
            self._num_bytes -= _num_bytes(positions.pop(next(iter(positions))))
            if not positions:
                del self._rows[name]


class GlobalLogprobsCapture(LogitsProcessor):
    """Records the log-softmax of every row of the latest step, without changing the logits.

    The class and its subclasses can be created without arguments. Rows are like the logits: NumPy arrays, or
    tensors of the same dtype on the same device. Each caller gets copies. A step replaces the previous one as
    a whole. If a step exceeds `max_bytes`, only its first rows are kept. All methods are thread-safe.
    """

    Args = NoArgs
    applies_to_all = True
    keeps_rows = True

    def __init__(self, config: EngineConfig | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        del config
        self._max_bytes = _checked(max_bytes)
        self._has_warned = False
        self._lock = threading.Lock()
        self._captured_batch: Sequence[Any] = ()  # guarded by `_lock`; never modified

    def is_argmax_invariant(self) -> bool:
        """Return True: nothing changes."""
        return True

    def update_state(self, batch_update: Any = None) -> None:
        """Do nothing: rows are identified by their index only."""

    def apply(self, logits: Any) -> Any:
        """Store the rows of the step and return the logits unchanged."""
        self.keep(_log_softmax(self._kept_part(logits)))
        return logits

    def keep(self, logprobs: Any) -> None:
        """Store n (V,) rows of log-probabilities in nats, arrays or tensors, as the latest step.

        Do not modify the rows later.
        """
        rows = tuple(self._kept_part(logprobs))
        with self._lock:
            self._captured_batch = rows

    def get_logprobs(self, batch_index: int = 0) -> Any:
        """Return one row of the latest step, (V,) nats; -1 is the last row. None if out of range."""
        with self._lock:
            row = _at(self._captured_batch, batch_index)
        return None if row is None else copied(row)

    def get_all_logprobs(self) -> Any:
        """Return all rows of the latest step, (n, V) nats; None if there are none."""
        with self._lock:
            latest = self._captured_batch
        if not latest:
            return None
        if isinstance(latest[0], np.ndarray):
            return np.stack(latest)
        import torch

        return torch.stack([*latest])

    def clear(self) -> None:
        """Delete the rows of the latest step."""
        with self._lock:
            self._captured_batch = ()

    def _kept_part(self, rows: Any) -> Any:
        """Return the first rows that fit in `max_bytes`."""
        num_kept = self._max_bytes // rows[0].nbytes if len(rows) else 0
        if num_kept < len(rows) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s keeps only %d of the %d rows of a step; raise max_bytes (now %d)",
                type(self).__name__,
                num_kept,
                len(rows),
                self._max_bytes,
            )
        return rows[:num_kept]


def _log_softmax(logits: Any) -> Any:
    """Return the log-softmax of each row, in the logits' type and dtype."""
    rows, dtype = as_rows(logits), logits.dtype
    with np.errstate(invalid="ignore", divide="ignore"):  # of invalid rows
        if dtype_of(rows) == "float64":
            values = host_array(rows)
            best = values.max(1, keepdims=True)
            logprobs = rows - like(best + np.log(np.exp(values - best).sum(1, keepdims=True)), rows)
        else:
            # A float32 log-softmax is off by 1e-5 for large vocabularies, so use our own log-sum-exp.
            lse = extract(rows, [0] * len(rows), 0).lse
            if isinstance(rows, np.ndarray):
                logprobs = (rows.astype(np.float32, copy=False) - lse[:, None]).astype(rows.dtype, copy=False)
            else:
                logprobs = (rows.float() - lse[:, None]).to(dtype)
    return logprobs if isinstance(logits, np.ndarray) else as_tensor(logprobs)


def _at(rows: Sequence[Row], index: int) -> Row | None:
    return rows[index] if -len(rows) <= index < len(rows) else None


def _checked(max_bytes: int) -> int:
    require(max_bytes > 0, "max_bytes", f"must be positive, got {max_bytes}")
    return max_bytes


def _num_bytes(row: Any) -> int:
    return 0 if row is None else int(row.nbytes)
