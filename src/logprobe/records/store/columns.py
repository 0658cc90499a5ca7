"""Growing columns of numbers, and the types and checks that all of them share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from logprobe.errors import ParameterError

Array = npt.NDArray[Any]


class Column:
    """Numbers in arrays end to end that are never written to again, so that readers need no lock.

    New values are joined with the array before them as long as that is not longer: the arrays are few, and
    how often a value is copied grows with the logarithm of the length.
    """

    __slots__ = ("_parts",)

    def __init__(self, values: Array) -> None:
        self._parts: tuple[Array, ...] = (values,)

    def append(self, values: Array) -> None:
        """Add values (n,), which nobody else may write to; the wider of the two types holds all."""
        parts = list(self._parts)
        while parts and len(parts[-1]) <= len(values):
            values = np.concatenate([parts.pop(), values])
        self._parts = (*parts, values)

    def read(self, start: int, stop: int) -> Array:
        """Values [start, stop): a view where one array has them all."""
        found = []
        for part in self._parts:
            if start < len(part) and stop > 0:
                found.append(part[max(start, 0) : stop])
            start, stop = start - len(part), stop - len(part)
        if not found:
            return self._parts[0][:0]
        return found[0] if len(found) == 1 else np.concatenate(found)


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


def narrow_copy(numbers: Array) -> Array:
    """A copy of ids or ranks >= 0 in the narrowest type that holds them."""
    return numbers.astype(narrowest_id_dtype(int(numbers.max(initial=0))), order="C")


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
