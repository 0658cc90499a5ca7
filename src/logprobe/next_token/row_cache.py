"""`RowCache`: the rows asked last, within a bound in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from logprobe.config import require

if TYPE_CHECKING:
    from logprobe.engine.request import Request

Row: TypeAlias = NDArray[np.float32]
"""(V,) log-probabilities, nats, read-only."""

RowKey: TypeAlias = tuple[str | None, bytes]
"""All that changes a row of one model: the adapter and every token id."""


def key_of(request: Request) -> RowKey:
    """The key of the row that a request asks for."""
    return request.adapter, request.prompt_token_ids.tobytes()


@final
class RowCache:
    """Least recently used rows go first once rows and keys take more than `max_bytes`; 0 keeps none."""

    def __init__(self, max_bytes: int) -> None:
        is_bound = isinstance(max_bytes, int) and not isinstance(max_bytes, bool) and max_bytes >= 0
        known = "must be a number of bytes (0 keeps no rows); a cache without a bound would fill the memory"
        require(is_bound, "cache_bytes", f"{known}, got {max_bytes!r}")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._rows: OrderedDict[RowKey, Row] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: RowKey) -> Row | None:
        """The row of a key, now the most recently used; None where it is not kept."""
        with self._lock:
            row = self._rows.get(key)
            if row is not None:
                self._rows.move_to_end(key)
            return row

    def put(self, key: RowKey, row: Row) -> None:
        """Keep a row of its own memory, and let the oldest go where the bound asks it."""
        with self._lock:
            self._drop(key)
            self._rows[key] = row
            self.num_bytes += _size(key, row)
            while self.num_bytes > self.max_bytes:
                self._drop(next(iter(self._rows)))

    def clear(self) -> None:
        """Forget every row."""
        with self._lock:
            self._rows.clear()
            self.num_bytes = 0

    def _drop(self, key: RowKey) -> None:
        row = self._rows.pop(key, None)
        if row is not None:
            self.num_bytes -= _size(key, row)


def _size(key: RowKey, row: Row) -> int:
    return row.nbytes + len(key[1])
