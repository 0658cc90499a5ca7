"""Growing typed columns.

Before it: rows that a step found. After it: the stores of `FlatLogprobs`.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = npt.NDArray[Any]

MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 1 << 10, 1 << 16
CHUNK_ROWS = 1024


class Column:
    """Rows of one type in blocks that never move; the owner publishes how many rows count.

    Blocks double from 1 KiB to 64 KiB, so a long column wastes at most one block, nothing is copied to grow,
    and a view that a reader holds stays valid while the writer goes on.
    """

    __slots__ = ("_blocks", "_starts", "dtype", "width")

    def __init__(self, dtype: npt.DTypeLike, width: int | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.width = width  # None: rows are scalars
        self._blocks: list[Array] = []
        self._starts: list[int] = []

    @classmethod
    def of(cls, values: Array) -> Column:
        """Wrap an array (n,) or (n, width) without a copy."""
        column = cls(values.dtype, None if values.ndim == 1 else values.shape[1])
        if len(values):
            column._blocks, column._starts = [values], [0]
        return column

    @property
    def starts(self) -> list[int]:
        """First row of each block."""
        return self._starts

    def write(self, at: int, values: Array) -> None:
        """Put values (n, ...) at rows [at, at + n); rows before `at` are never touched."""
        done = 0
        while done < len(values):
            block, start = self._block_for(at + done, len(values) - done)
            first = at + done - start
            count = min(len(values) - done, len(block) - first)
            block[first : first + count] = values[done : done + count]
            done += count

    def write_one(self, at: int, value: Any) -> None:
        """Put one row at row `at`."""
        block, start = self._block_for(at, 1)
        block[at - start] = value

    def _block_for(self, at: int, count: int) -> tuple[Array, int]:
        if self._blocks:
            block, start = self._blocks[-1], self._starts[-1]
            if at < start + len(block):
                return block, start
        row_bytes = max(self.dtype.itemsize * (1 if self.width is None else self.width), 1)
        least, most = max(MIN_BLOCK_BYTES // row_bytes, 1), max(MAX_BLOCK_BYTES // row_bytes, 1)
        capacity = min(max(at, count, least), most)
        block = np.empty(capacity if self.width is None else (capacity, self.width), self.dtype)
        # The block before its start: a reader that finds the start also finds the block.
        self._blocks.append(block)
        self._starts.append(at)
        return block, at

    def row(self, index: int) -> Any:
        """Row `index`, without a copy."""
        number = bisect_right(self._starts, index) - 1
        return self._blocks[number][index - self._starts[number]]

    def parts(self, start: int, stop: int) -> Iterator[Array]:
        """Rows [start, stop) as views, one a block."""
        number = max(bisect_right(self._starts, start) - 1, 0)
        while start < stop:
            block, first = self._blocks[number], self._starts[number]
            part = block[start - first : stop - first]
            yield part
            start += len(part)
            number += 1

    def read(self, start: int, stop: int) -> Array:
        """Rows [start, stop) as one array: a view where they lie in one block, else a copy."""
        parts = list(self.parts(start, stop))
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return np.empty(0 if self.width is None else (0, self.width), self.dtype)
        return np.concatenate(parts)

    def view(self, start: int, stop: int) -> Column:
        """Rows [start, stop) as a column of its own that shares the memory and can grow apart."""
        column = Column(self.dtype, self.width)
        at = 0
        for part in self.parts(start, stop):
            column._blocks.append(part)
            column._starts.append(at)
            at += len(part)
        return column

    def widen(self, dtype: npt.DTypeLike, count: int) -> None:
        """Change the type of the `count` rows that stand; readers go on with the old blocks until then.

        What lies beyond them was never written: as a float it may be a signaling NaN, whose cast warns.
        """
        blocks: list[Array] = []
        for block, start in zip(self._blocks, self._starts, strict=True):
            wide = np.empty(block.shape, dtype)
            wide[: max(count - start, 0)] = block[: max(count - start, 0)]
            blocks.append(wide)
        self._blocks, self.dtype = blocks, np.dtype(dtype)

    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * (1 if self.width is None else self.width)


def narrowed(values: Array) -> Array:
    """Float32 where every value is one exactly (NaN stays NaN), else float64."""
    if values.dtype == np.float32:
        return values
    wide = values.astype(np.float64)
    with np.errstate(over="ignore"):  # what overflows is not equal, so it stays wide
        narrow = wide.astype(np.float32)
    is_same = narrow == wide
    return narrow if is_same.all() or (is_same | np.isnan(wide)).all() else wide


def check_not_negative(**columns: Array) -> None:
    """Raise `ParameterError` where a column of ids or ranks holds a negative number."""
    for name, values in columns.items():
        if values.size and values.min() < 0:
            raise ParameterError(name, f"{int(values.min())} is negative; drop padding before appending")


def float_column(logprobs: Array) -> Array:
    """Float32 where every value is one exactly, else float64.

    Raises:
        ParameterError: a value is +inf.
    """
    if (logprobs == np.inf).any():
        raise ParameterError("logprobs", "a value is +inf, which no log-probability is; check the logits")
    return narrowed(logprobs)


def narrowest_id_dtype(largest: int) -> np.dtype[Any]:
    """uint16, int32 or int64: the narrowest that holds token ids up to `largest`."""
    if largest <= np.iinfo(np.uint16).max:
        return np.dtype(np.uint16)
    return np.dtype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


def chunks(num_rows: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of at most CHUNK_ROWS rows that cover `num_rows`."""
    return ((start, min(start + CHUNK_ROWS, num_rows)) for start in range(0, num_rows, CHUNK_ROWS))


def logs_of_rest(listed: Array) -> Array:
    """Log of the mass that rows of listed log-probabilities (n, m) leave, (n,) float32, nats; -inf: nothing.

    Taken as log(-expm1(s)) of a row's log-sum s, which keeps the digits of a small rest.
    """
    values = listed.astype(np.float64)
    largest = values.max(axis=1, initial=np.finfo(np.float64).min)
    with np.errstate(divide="ignore"):  # a sum or a rest of 0
        totals = largest + np.log(np.exp(values - largest[:, None]).sum(axis=1))
        rest: Array = np.log(-np.expm1(np.minimum(totals, 0))).astype(np.float32)
    return rest
