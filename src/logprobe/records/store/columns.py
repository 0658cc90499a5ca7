"""Append-only columns of numbers, and dtype and validity helpers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from logprobe.errors import ParameterError

Array = npt.NDArray[Any]


class Column:
    """Append-only column of numbers, stored as a list of immutable arrays so that readers need no lock.

    An append merges trailing arrays that are not longer than the new one. The number of arrays, and the
    number of times that a value is copied, are therefore logarithmic in the length.
    """

    __slots__ = ("_parts",)

    def __init__(self, values: Array) -> None:
        self._parts: tuple[Array, ...] = (values,)

    def append(self, values: Array) -> None:
        """Add an array (n,), which must not be modified afterwards; merged arrays take the wider dtype."""
        parts = list(self._parts)
        while parts and len(parts[-1]) <= len(values):
            values = np.concatenate([parts.pop(), values])
        self._parts = (*parts, values)

    def read(self, start: int, stop: int) -> Array:
        """Return values [start, stop), as a view if one stored array holds all of them."""
        found = []
        for part in self._parts:
            if start < len(part) and stop > 0:
                found.append(part[max(start, 0) : stop])
            start, stop = start - len(part), stop - len(part)
        if not found:
            return self._parts[0][:0]
        return found[0] if len(found) == 1 else np.concatenate(found)


def narrowed(values: Array) -> Array:
    """Convert to float32 if float32 represents every value exactly (NaN counts as exact), else to float64."""
    if values.dtype == np.float32:
        return values
    wide = values.astype(np.float64)
    with np.errstate(over="ignore"):  # an overflow compares unequal and keeps float64
        narrow = wide.astype(np.float32)
    is_same = narrow == wide
    return narrow if is_same.all() or (is_same | np.isnan(wide)).all() else wide


def check_not_negative(**columns: Array) -> None:
    """Raise `ParameterError` if a column of ids or ranks holds a negative number."""
    for name, values in columns.items():
        if values.size and values.min() < 0:
            raise ParameterError(name, f"{int(values.min())} is negative; remove padding before appending")


def float_column(logprobs: Array) -> Array:
    """Convert to float32 if float32 represents every value exactly, else to float64.

    Raises:
        ParameterError: a value is +inf.
    """
    if (logprobs == np.inf).any():
        raise ParameterError("logprobs", "a value is +inf, which is not a log-probability; check the logits")
    return narrowed(logprobs)


def narrowest_id_dtype(largest: int) -> np.dtype[Any]:
    """Return the narrowest of uint16, int32 and int64 that holds token ids up to `largest`."""
    if largest <= np.iinfo(np.uint16).max:
        return np.dtype(np.uint16)
    return np.dtype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


def narrow_copy(numbers: Array) -> Array:
    """Copy non-negative ids or ranks to the narrowest integer type that holds them."""
    return numbers.astype(narrowest_id_dtype(int(numbers.max(initial=0))), order="C")


def logs_of_rest(listed: Array) -> Array:
    """Return log(1 - sum of the probabilities) for each row of logprobs, (n, m) nats -> (n,) float32.

    The result is -inf if nothing remains. It is computed as log(-expm1(s)) from a row's log-sum-exp s,
    which is accurate for small remainders.
    """
    values = listed.astype(np.float64)
    largest = values.max(axis=1, initial=np.finfo(np.float64).min)
    with np.errstate(divide="ignore"):  # log of a sum or remainder of 0
        totals = largest + np.log(np.exp(values - largest[:, None]).sum(axis=1))
        rest: Array = np.log(-np.expm1(np.minimum(totals, 0))).astype(np.float32)
    return rest
