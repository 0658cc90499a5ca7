"""Validated requests of extraction, and the arrays for their results.

Arguments are validated once, before anything is computed; kernels do not check them again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from logprobe.errors import ParameterError
from logprobe.kernels.placement import is_array
from logprobe.records.rows import KERNEL_EXTRAS, DeviceRows, GivenLogprobs, host_array

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.kernels.placement import Rows
    from logprobe.records.rows import Column

IdsLike: TypeAlias = "Tensor | NDArray[np.integer] | Sequence[int]"
GivenLike: TypeAlias = "IdsLike | Sequence[IdsLike | None] | None"

LOGITS_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequests:
    """What to compute for each of B rows of logits; validated.

    The fields are NumPy arrays, or tensors if `device.requests_on` has copied them to a device.
    """

    vocab_size: int
    chosen_ids: Column  # (B,) int32
    num_logprobs: Column  # (B,) int32, each in [0, vocab_size]
    width: int  # columns of the rectangular output: max(num_logprobs) + 1
    given_offsets: Column | None  # (B + 1,) int64 into given_ids, which `rows` does not slice
    given_ids: Column | None  # (N,) int32, the ids of all rows, concatenated
    extras: tuple[str, ...]  # requested columns, in the order of KERNEL_EXTRAS

    def rows(self, start: int, stop: int) -> RowRequests:
        """Return the requests of rows [start, stop), as views."""
        offsets = self.given_offsets
        return RowRequests(
            vocab_size=self.vocab_size,
            chosen_ids=self.chosen_ids[start:stop],
            num_logprobs=self.num_logprobs[start:stop],
            width=self.width,
            given_offsets=None if offsets is None else offsets[start : stop + 1],
            given_ids=self.given_ids,
            extras=self.extras,
        )

    def mapped(self, convert: Callable[[Column], Column]) -> RowRequests:
        """Return the same requests with `convert` applied to each array."""
        offsets, given_ids = self.given_offsets, self.given_ids
        return replace(
            self,
            chosen_ids=convert(self.chosen_ids),
            num_logprobs=convert(self.num_logprobs),
            given_offsets=None if offsets is None else convert(offsets),
            given_ids=None if given_ids is None else convert(given_ids),
        )

    def of_tokens(self, chosen_ids: NDArray[np.int32]) -> RowRequests:
        """Return the same requests with other chosen tokens: (B,) int32 ids, which are not checked."""
        return replace(self, chosen_ids=chosen_ids)


def check_rows(rows: Rows, parameter: str = "logits") -> tuple[int, int]:
    """Return the number of rows and the vocabulary size of (B, V) rows.

    Raises:
        ParameterError: `rows` is not an array or tensor of shape (B, V) with V >= 1 and dtype float32,
            float16 or bfloat16.
    """
    if not is_array(rows):
        raise ParameterError(parameter, f"must be a NumPy array or torch tensor, not {type(rows).__name__}")
    if dtype_of(rows) not in LOGITS_DTYPES:
        raise ParameterError(parameter, f"must be float32, float16 or bfloat16, not {rows.dtype}")
    if rows.ndim != 2 or rows.shape[1] < 1:
        raise ParameterError(parameter, f"must have shape (B, V) with V >= 1, not {tuple(rows.shape)}")
    return rows.shape[0], rows.shape[1]


def dtype_of(values: Rows) -> str:
    """Return the name of the dtype of an array or tensor, such as `float32`."""
    return str(values.dtype).removeprefix("torch.")


def check_ids(ids: object, vocab_size: int, parameter: str) -> NDArray[np.int32]:
    """Return token ids of any shape as an int32 array on the host.

    Raises:
        ParameterError: the ids are not integers, or an id is outside the vocabulary.
    """
    array = _int_array(ids, parameter)
    # As unsigned numbers, negative ids are larger than any vocabulary.
    if array.size and array.astype(np.int64).view(np.uint64).max() >= vocab_size:
        wrong = array[(array < 0) | (array >= vocab_size)].flat[0]
        raise ParameterError(parameter, f"{wrong} is outside the vocabulary [0, {vocab_size})")
    return array.astype(np.int32)


def check_requests(
    shape: tuple[int, int],
    chosen_ids: IdsLike,
    k: int | IdsLike,
    *,
    given_ids: GivenLike = None,
    **extras: bool,
) -> RowRequests:
    """Validate the arguments of `extract` for logits of shape (B, V); k = -1 and k > V become V.

    Raises:
        ParameterError: an argument has a wrong shape or dtype, an id is outside the vocabulary, k < -1, or an
            extra column is unknown.
    """
    num_rows, vocab_size = shape
    num_logprobs = _check_k(k, num_rows, vocab_size)
    offsets, given = _check_given(given_ids, num_rows, vocab_size)
    return RowRequests(
        vocab_size=vocab_size,
        chosen_ids=_check_chosen(chosen_ids, num_rows, vocab_size),
        num_logprobs=num_logprobs,
        width=1 + int(num_logprobs.max(initial=0)),
        given_offsets=offsets,
        given_ids=given,
        extras=_check_extras(extras),
    )


def allocate(
    requests: RowRequests,
    *,
    dtype: npt.DTypeLike = "float32",
    empty: Callable[[Any, Any], Column] = np.empty,
    put: Callable[[Column], Column] = np.asarray,
) -> DeviceRows:
    """Allocate the columns for `requests`, uninitialized except for the extra columns.

    Extra columns are filled with NaN, which remains if a kernel does not support a column.

    Args:
        requests: the validated requests.
        dtype: dtype of columns of floats.
        empty: allocates a column from its shape and the name of its dtype.
        put: copies an array of the requests to the device of the columns, if necessary.
    """
    num_rows = len(requests.chosen_ids)
    given = None
    if requests.given_ids is not None and requests.given_offsets is not None:
        given = GivenLogprobs(
            offsets=put(requests.given_offsets),
            token_ids=put(requests.given_ids),
            logprobs=empty(len(requests.given_ids), dtype),
            ranks=empty(len(requests.given_ids), "int32"),
        )
    extras = {name: empty(num_rows, dtype) for name in requests.extras}
    for column in extras.values():
        column[:] = np.nan
    return DeviceRows(
        token_ids=empty((num_rows, requests.width), "int32"),
        logprobs=empty((num_rows, requests.width), dtype),
        ranks=empty(num_rows, "int32"),
        lse=empty(num_rows, dtype),
        num_logprobs=put(requests.num_logprobs),
        is_valid=empty(num_rows, "bool"),
        extras=extras,
        given=given,
    )


def _check_extras(asked: Mapping[str, bool]) -> tuple[str, ...]:
    for name in asked:
        if name not in KERNEL_EXTRAS:
            known = ", ".join(KERNEL_EXTRAS)
            raise ParameterError(name, f"is not an extra column; use one of {known}")
    return tuple([name for name in KERNEL_EXTRAS if asked.get(name)])


def _check_chosen(chosen_ids: IdsLike, num_rows: int, vocab_size: int) -> NDArray[np.int32]:
    ids = check_ids(chosen_ids, vocab_size, "chosen_ids")
    if ids.shape != (num_rows,):
        raise ParameterError("chosen_ids", f"must have shape ({num_rows},), one per row, not {ids.shape}")
    return ids


def _check_k(k: int | IdsLike, num_rows: int, vocab_size: int) -> NDArray[np.int32]:
    counts = _int_array(k, "k")
    if counts.shape not in {(), (num_rows,)}:
        raise ParameterError("k", f"must be one number or have shape ({num_rows},), not {counts.shape}")
    if counts.size and (least := counts.min()) < -1:
        raise ParameterError("k", f"must be -1 (whole vocabulary) or more, not {least}")
    clipped = np.minimum(np.where(counts < 0, vocab_size, counts), vocab_size)
    return np.full(num_rows, clipped, dtype=np.int32)


def _check_given(
    given_ids: GivenLike, num_rows: int, vocab_size: int
) -> tuple[NDArray[np.int64] | None, NDArray[np.int32] | None]:
    if given_ids is None:
        return None, None
    if _is_shared(given_ids):
        shared = check_ids(_flat_ids(given_ids), vocab_size, "given_ids")
        offsets = np.arange(num_rows + 1, dtype=np.int64) * len(shared)
        return offsets, np.tile(shared, num_rows)
    rows = [np.empty(0, np.int32) if ids is None else _flat_ids(ids) for ids in given_ids]
    if len(rows) != num_rows:
        raise ParameterError("given_ids", f"must have one entry for each of {num_rows} rows, not {len(rows)}")
    flat = check_ids(np.concatenate(rows) if rows else np.empty(0, np.int32), vocab_size, "given_ids")
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets, flat


def _is_shared(given_ids: GivenLike) -> bool:
    """Return True if `given_ids` is one list of ids for all rows."""
    if is_array(given_ids):
        array: Any = given_ids
        return bool(array.ndim == 1 and array.dtype != object)
    return all(isinstance(entry, (int, np.integer)) for entry in given_ids or ())


def _flat_ids(ids: object) -> NDArray[np.integer]:
    flat = _int_array(ids, "given_ids")
    if flat.ndim != 1:
        raise ParameterError("given_ids", f"must be one-dimensional for each row, not of shape {flat.shape}")
    return flat


def _int_array(values: Any, parameter: str) -> NDArray[np.integer]:
    array = host_array(values)
    if array.size == 0:
        return array.astype(np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise ParameterError(parameter, f"must hold integers, not {array.dtype}")
    return array
