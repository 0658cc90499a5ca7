"""`CaptureLogitsProcessor`: keeps whole rows of the requests that ask for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from logprobe.errors import require
from logprobe.kernels import extract
from logprobe.processors.arguments import CaptureArgs
from logprobe.processors.batch import BatchState, as_batch
from logprobe.processors.interface import LogitsProcessor

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.config import EngineConfig

FloatArray: TypeAlias = NDArray[np.float32]
DEFAULT_MAX_BYTES = 256 << 20


@final
class CaptureLogitsProcessor(LogitsProcessor):
    """Keeps the log-softmax of every row of the requests with `capture`, by request; changes nothing.

    It holds the logits as they are at its place among the processors. The store is bounded: the rows of
    the request that was captured longest ago go first. All methods may be called from any thread; a row
    comes whole or not at all, and is read-only.
    """

    Args = CaptureArgs

    def __init__(self, config: EngineConfig, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        del config
        require(max_bytes > 0, "max_bytes", f"must be positive, got {max_bytes}")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # All below is guarded by `_lock`: name → position → row; the row of each captured row of a step.
        self._rows: OrderedDict[str, dict[int, FloatArray]] = OrderedDict()
        self._last: list[FloatArray] = []
        self._num_bytes = 0
        self._places: list[tuple[int, str, int]] = []  # row of the logits, name, position

    def update_state(self, batch: BatchState) -> None:
        """Note whose rows come next, and which positions they are."""
        batch = as_batch(batch, CaptureArgs)
        self._places = [
            (
                place,
                row.args.capture if isinstance(row.args.capture, str) else row.name,
                len(row.output_token_ids),
            )
            for place, row in enumerate(batch.rows)
            if row.args.capture
        ]

    def apply(self, logits: Tensor) -> Tensor:
        """Keep the rows and hand the logits on untouched."""
        if not self._places:
            return logits
        part = logits[[place for place, _, _ in self._places]].float()
        normalisers = extract(part, [0] * len(part), 0).lse
        rows = [(row - lse).numpy(force=True) for row, lse in zip(part, normalisers, strict=True)]
        with self._lock:
            self._last = rows
            for (_, name, position), row in zip(self._places, rows, strict=True):
                self._keep(name, position, row)
            self._drop_oldest()
        return logits

    def get_logprobs(self, batch_index: int = 0) -> FloatArray | None:
        """One row of the latest step, (V,) nats, by its place among the captured ones; None: no such row."""
        with self._lock:
            return self._last[batch_index] if 0 <= batch_index < len(self._last) else None

    def get_all_logprobs(self) -> FloatArray | None:
        """All rows captured in the latest step, (n, V) nats; None where nothing was captured."""
        with self._lock:
            last = self._last
        return np.stack(last) if last else None

    def get_rows(self, name: str) -> dict[int, FloatArray]:
        """The rows of one request (its id or its `capture` text): number of tokens before it → (V,) nats."""
        with self._lock:
            return dict(self._rows.get(name, {}))

    def names(self) -> list[str]:
        """The requests of which rows are kept, the one captured longest ago first."""
        with self._lock:
            return list(self._rows)

    def clear(self) -> None:
        """Forget all rows."""
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


def _num_bytes(row: Any) -> int:
    return 0 if row is None else int(row.nbytes)


GlobalLogprobsCapture = CaptureLogitsProcessor
