"""Computes log-probabilities, ranks, top-k and extra columns from rows of logits.

Arguments are validated once, before anything is computed; kernels do not check them again. The device of the
logits selects the kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from logprobe.errors import ParameterError
from logprobe.kernels.info import kernel_of
from logprobe.records.rows import KERNEL_EXTRAS, DeviceRows, GivenLogprobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

IdsLike: TypeAlias = "Tensor | NDArray[np.integer] | Sequence[int]"
GivenLike: TypeAlias = "IdsLike | Sequence[IdsLike | None] | None"

LOGITS_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MODULES = {
    "native": "logprobe.kernels.extraction.cpu",
    "triton": "logprobe.kernels.extraction.triton",
    "torch": "logprobe.kernels.extraction.reference",
}


def extract(
    logits: Tensor,
    chosen_ids: IdsLike,
    k: int | IdsLike,
    *,
    given_ids: GivenLike = None,
    **extras: bool,
) -> DeviceRows:
    """Return log-probabilities and ranks for each row of logits, in nats.

    A rank is 1 + the number of strictly greater logits in the row. The top k are sorted by descending
    log-probability, and by ascending token id among equals. A row that contains NaN or +inf, or only -inf,
    has `is_valid` False, NaN in float columns, and 0 as ranks and top-k ids. A row's result never depends on
    other rows.

    Args:
        logits: (B, V) float32, float16 or bfloat16, any strides.
        chosen_ids: (B,) token ids, one per row, reported in column 0.
        k: number of most probable tokens to report: one number, or (B,) numbers, one per row. 0: the chosen
            token only; -1 or more than V: the whole vocabulary.
        given_ids: further token ids to report with log-probability and rank: a 1-D array for all rows, or a
            sequence of B arrays (or None), one per row.
        **extras: extra columns to compute, by name, such as `entropy=True`.

    Raises:
        ParameterError: an argument has a wrong shape or dtype, an id is outside the vocabulary, k < -1, or an
            extra column is unknown.
    """
    return extract_checked(
        logits, check_requests(check_rows(logits), chosen_ids, k, given_ids=given_ids, **extras)
    )


def extract_checked(logits: Tensor, requests: RowRequests) -> DeviceRows:
    """Compute `extract` for arguments that `check_requests` has validated."""
    output = allocate(requests, logits.device)
    fill(logits, requests, output)
    return output


def fill(logits: Tensor, requests: RowRequests, output: DeviceRows) -> None:
    """Compute what `requests` ask for from (B, V) logits, and write it to `output`.

    Uses the kernel for the device of the logits.
    """
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # Triton launches on the current GPU
        _kernel(logits.device.type).fill(logits, requests, output)


@functools.cache
def _kernel(device_type: str) -> ModuleType:
    return import_module(_MODULES[kernel_of(device_type)])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequests:
    """What to compute for each of B rows of logits; validated."""

    vocab_size: int
    chosen_ids: Tensor  # (B,) int32
    num_logprobs: Tensor  # (B,) int32, each in [0, vocab_size]
    width: int  # columns of the rectangular output: max(num_logprobs) + 1
    given_offsets: Tensor | None  # (B + 1,) int64 into given_ids, which `rows` does not slice
    given_ids: Tensor | None  # (N,) int32, the ids of all rows, concatenated
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

    def of_tokens(self, chosen_ids: Tensor) -> RowRequests:
        """Return the same requests with other chosen tokens: (B,) int32 ids, which are not checked."""
        return replace(self, chosen_ids=chosen_ids)

    def to(self, device: torch.device) -> RowRequests:
        """Return the same requests with every array on `device`."""
        if device.type == "cpu":
            return self
        return RowRequests(
            vocab_size=self.vocab_size,
            chosen_ids=copy_to(self.chosen_ids, device),
            num_logprobs=copy_to(self.num_logprobs, device),
            width=self.width,
            given_offsets=None if self.given_offsets is None else copy_to(self.given_offsets, device),
            given_ids=None if self.given_ids is None else copy_to(self.given_ids, device),
            extras=self.extras,
        )


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to `device`; a copy from the host to a GPU is asynchronous, through pinned memory."""
    if tensor.device.type == "cpu" and device.type == "cuda" and tensor.numel():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def check_rows(rows: Tensor, parameter: str = "logits") -> tuple[int, int]:
    """Return the number of rows and the vocabulary size of a (B, V) tensor.

    Raises:
        ParameterError: `rows` is not a (B, V) tensor of float32, float16 or bfloat16 with V >= 1.
    """
    if not isinstance(rows, Tensor):
        raise ParameterError(parameter, f"must be a torch tensor, not {type(rows).__name__}")
    if rows.dtype not in LOGITS_DTYPES:
        raise ParameterError(parameter, f"must be float32, float16 or bfloat16, not {rows.dtype}")
    if rows.ndim != 2 or rows.shape[1] < 1:
        raise ParameterError(parameter, f"must have shape (B, V) with V >= 1, not {tuple(rows.shape)}")
    return rows.shape[0], rows.shape[1]


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
        chosen_ids=torch.from_numpy(_check_chosen(chosen_ids, num_rows, vocab_size)),
        num_logprobs=torch.from_numpy(num_logprobs),
        width=1 + int(num_logprobs.max(initial=0)),
        given_offsets=offsets,
        given_ids=given,
        extras=_check_extras(extras),
    )


def allocate(
    requests: RowRequests, device: torch.device, *, dtype: torch.dtype = torch.float32
) -> DeviceRows:
    """Allocate the output for `requests`, uninitialized except for the extra columns.

    Extra columns are filled with NaN, which remains if a kernel does not support a column.
    """
    num_rows = len(requests.chosen_ids)
    given = None
    if requests.given_ids is not None and requests.given_offsets is not None:
        given = GivenLogprobs(
            offsets=copy_to(requests.given_offsets, device),
            token_ids=copy_to(requests.given_ids, device),
            logprobs=torch.empty(len(requests.given_ids), dtype=dtype, device=device),
            ranks=torch.empty(len(requests.given_ids), dtype=torch.int32, device=device),
        )
    return DeviceRows(
        token_ids=torch.empty((num_rows, requests.width), dtype=torch.int32, device=device),
        logprobs=torch.empty((num_rows, requests.width), dtype=dtype, device=device),
        ranks=torch.empty(num_rows, dtype=torch.int32, device=device),
        lse=torch.empty(num_rows, dtype=dtype, device=device),
        num_logprobs=copy_to(requests.num_logprobs, device),
        is_valid=torch.empty(num_rows, dtype=torch.bool, device=device),
        extras={
            name: torch.full((num_rows,), torch.nan, dtype=dtype, device=device) for name in requests.extras
        },
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


def _check_given(given_ids: GivenLike, num_rows: int, vocab_size: int) -> tuple[Tensor | None, Tensor | None]:
    if given_ids is None:
        return None, None
    if _is_shared(given_ids):
        shared = check_ids(_flat_ids(given_ids), vocab_size, "given_ids")
        offsets = np.arange(num_rows + 1, dtype=np.int64) * len(shared)
        return torch.from_numpy(offsets), torch.from_numpy(np.tile(shared, num_rows))
    rows = [np.empty(0, np.int32) if ids is None else _flat_ids(ids) for ids in given_ids]
    if len(rows) != num_rows:
        raise ParameterError("given_ids", f"must have one entry for each of {num_rows} rows, not {len(rows)}")
    flat = check_ids(np.concatenate(rows) if rows else np.empty(0, np.int32), vocab_size, "given_ids")
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return torch.from_numpy(offsets), torch.from_numpy(flat)


def _is_shared(given_ids: GivenLike) -> bool:
    """Return True if `given_ids` is one list of ids for all rows."""
    if isinstance(given_ids, (Tensor, np.ndarray)):
        return given_ids.ndim == 1 and given_ids.dtype != object
    return all(isinstance(entry, (int, np.integer)) for entry in given_ids or ())


def _flat_ids(ids: object) -> NDArray[np.integer]:
    flat = _int_array(ids, "given_ids")
    if flat.ndim != 1:
        raise ParameterError("given_ids", f"must be one-dimensional for each row, not of shape {flat.shape}")
    return flat


def _int_array(values: object, parameter: str) -> NDArray[np.integer]:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.size == 0:
        return array.astype(np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise ParameterError(parameter, f"must hold integers, not {array.dtype}")
    return array
