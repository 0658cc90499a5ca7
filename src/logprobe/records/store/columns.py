"""Append-only columns of numbers, and dtype and validity helpers."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = npt.NDArray[Any]
Numbers: TypeAlias = "array[int] | array[float]"

MAX_WAITING: Final = 4096  # numbers in a column's write buffer
FEW: Final = 32  # up to this many numbers, an array is added to the write buffer
MAX_MERGED_BYTES: Final = 1 << 16  # a larger array is not copied to be merged with the next one


class Column:
    """Append-only column of numbers that one thread may extend while others read.

    It holds arrays that never change, and a write buffer for single rows, because NumPy takes as long for
    one row as for a hundred. An append merges trailing small arrays that are not longer than the new one.
    """

    __slots__ = ("_held", "_typecode", "waiting")

    def __init__(self, typecode: str, pieces: Sequence[Array] = ()) -> None:
        """Create a column of the given arrays; `typecode` is the type of the write buffer.

        With "I" and "d", numbers are stored in the narrowest types that hold them exactly; with "f", as
        float32; with "B", as bool.
        """
        self._typecode = typecode
        starts = (0, *accumulate(map(len, pieces))) if pieces else (0,)
        # The arrays, the index of the first number in each and in the write buffer, and the write buffer.
        self._held: tuple[tuple[Array, ...], tuple[int, ...], Numbers]
        self.waiting: Any = array(typecode)  # the write buffer, for the writer
        self._held = tuple(pieces), starts, self.waiting

    def __len__(self) -> int:
        _, starts, waiting = self._held
        return starts[-1] + len(waiting)

    @property
    def nbytes(self) -> int:
        """Size of the numbers in bytes as one array."""
        return int(self.read(0, len(self)).nbytes)

    def append(self, values: Array) -> None:
        """Add an array (n,); merged arrays take the wider type."""
        try:
            few = array(self._typecode, values.tolist()) if len(values) <= FEW else None
        except OverflowError:  # a negative rank, or a number beyond 32 bits
            few = None
        if few is None:
            self._add(values)
            return
        self.waiting.extend(few)
        self.flush_full()

    def flush_full(self) -> None:
        """Move the numbers in the write buffer to an array if there are many."""
        if len(self.waiting) >= MAX_WAITING:
            self._add(np.empty(0))

    def truncate(self, length: int) -> None:
        """Keep the first `length` numbers; the numbers to remove must be in the write buffer."""
        del self.waiting[length - self._held[1][-1] :]

    def _add(self, values: Array) -> None:
        """Flush the write buffer, then add an array."""
        pieces, starts, waiting = [*self._held[0]], [*self._held[1]], self._held[2]
        for added in (np.array(waiting), values):
            if not len(added):
                continue
            piece = packed(self._typecode, added)
            while pieces and len(pieces[-1]) <= len(piece) and pieces[-1].nbytes <= MAX_MERGED_BYTES:
                piece = np.concatenate([pieces.pop(), piece])
                starts.pop()
            pieces.append(piece)
            starts.append(starts[-1] + len(piece))
        self.waiting = array(self._typecode)
        self._held = tuple(pieces), tuple(starts), self.waiting

    def _pieces(self, start: int, stop: int) -> list[Array]:
        """Return numbers [start, stop), as views of the stored arrays and a copy of the write buffer."""
        pieces, starts, waiting = self._held
        number, found = bisect_right(starts, start) - 1, []
        while start < stop and number < len(pieces):
            found.append(pieces[number][start - starts[number] : stop - starts[number]])
            number += 1
            start = starts[number]
        if start < stop or not found:
            found.append(packed(self._typecode, np.array(waiting[start - starts[-1] : stop - starts[-1]])))
        return found

    def read(self, start: int, stop: int) -> Array:
        """Return numbers [start, stop), as a view if one stored array holds all of them."""
        pieces = self._pieces(start, stop)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def tolist(self, start: int, stop: int) -> list[Any]:
        """Return numbers [start, stop) as Python values; for one row, this is faster than `read`."""
        pieces, starts, waiting = self._held
        number = bisect_right(starts, start) - 1
        if number == len(pieces):
            return [value + 0 for value in waiting[start - starts[-1] : stop - starts[-1]]]  # no -0.0
        if stop > starts[number + 1]:
            values: list[Any] = self.read(start, stop).tolist()
            return values
        values = pieces[number][start - starts[number] : stop - starts[number]].tolist()
        return values

    def cut(self, start: int, stop: int) -> Column:
        """Return a column of numbers [start, stop) that shares their memory but grows independently."""
        return Column(self._typecode, self._pieces(start, stop))


def packed(typecode: str, values: Array) -> Array:
    """Copy numbers to the type in which a column of this typecode stores them."""
    if typecode == "I":
        return pack_integers(values)
    if typecode == "d":
        return narrowed(values) + 0.0  # no -0.0
    return values.astype({"f": np.float32, "B": np.bool_}[typecode])


def pack_integers(values: Array) -> Array:
    """Copy integers to the narrowest of uint16, int32 and int64 that holds them."""
    dtype = narrowest_id_dtype(int(values.max(initial=0)))
    return values.astype(np.int32 if dtype == np.uint16 and values.min(initial=0) < 0 else dtype)


def narrowed(values: Array) -> Array:
    """Convert to float32 if float32 represents every value exactly (NaN counts as exact), else to float64."""
    if values.dtype == np.float32:
        return values
    wide = values.astype(np.float64)
    with np.errstate(over="ignore"):  # an overflow compares unequal and keeps float64
        narrow = wide.astype(np.float32)
    is_same = narrow == wide
    return narrow if is_same.all() or (is_same | np.isnan(wide)).all() else wide


def narrowest_id_dtype(largest: int) -> np.dtype[Any]:
    """Return the narrowest of uint16, int32 and int64 that holds token ids up to `largest`."""
    if largest < 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.int32 if largest < 1 << 31 else np.int64)


def check_not_negative(**columns: Array) -> None:
    """Raise `ParameterError` if a column of ids or ranks holds a negative number."""
    for name, values in columns.items():
        if values.size and values.min() < 0:
            raise ParameterError(name, f"{int(values.min())} is negative; remove padding before appending")


def check_not_infinite(logprobs: Array) -> None:
    """Raise `ParameterError` if a log-probability is +inf."""
    if (logprobs == np.inf).any():
        raise ParameterError("logprobs", "a value is +inf, which is not a log-probability; check the logits")


def spans(starts: Array, widths: Array) -> tuple[Array, Array]:
    """Return the offsets (n + 1,) of n ranges that are packed together, and the indices that they cover."""
    offsets = np.zeros(len(widths) + 1, np.int64)
    np.cumsum(widths, out=offsets[1:])
    return offsets, np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], widths)
