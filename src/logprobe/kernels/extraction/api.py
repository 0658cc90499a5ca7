"""Rows of logits → log-normaliser, chosen logprob and rank, top-k, given ids, further columns, in one pass.

Before it: the output head. After it: the per-request records. The device of the logits picks the kernel.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING

from logprobe.kernels.extraction.requests import allocate, check_requests, check_rows
from logprobe.kernels.info import kernel_of

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from logprobe.kernels.extraction.requests import GivenLike, IdsLike, RowRequests
    from logprobe.records.rows import DeviceRows

_MODULES = {
    "numba": "logprobe.kernels.extraction.numba",
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
    """Reduces each row of logits to the log-probabilities asked for, in nats.

    Ranks are 1 + the number of strictly greater logits; top-k is descending, ties by ascending token id.
    A row that holds NaN or +inf, or nothing but -inf, has `is_valid` False, NaN for numbers and 0 for
    ranks and top-k ids; other rows are not affected. A row's result never depends on its neighbours.

    Args:
        logits: (B, V) float32, float16 or bfloat16, any strides.
        chosen_ids: (B,) token ids, one a row, for column 0.
        k: how many top log-probabilities: one number, or (B,) numbers, one a row; 0 is the chosen token
            only, -1 the whole vocabulary, more than V gives V.
        given_ids: token ids whose log-probability and rank are wanted: one 1-D array for all rows, or a
            sequence of B arrays (or None), one a row.
        **extras: which further columns to return, by name: `entropy=True`.

    Raises:
        ParameterError: a shape or dtype that does not fit, an id outside the vocabulary, k < -1, no such
            column.
    """
    return extract_checked(
        logits, check_requests(check_rows(logits), chosen_ids, k, given_ids=given_ids, **extras)
    )


def extract_checked(logits: Tensor, requests: RowRequests) -> DeviceRows:
    """The same for requests that were checked."""
    output = allocate(requests, logits.device)
    fill(logits, requests, output)
    return output


def fill(logits: Tensor, requests: RowRequests, output: DeviceRows) -> None:
    """Writes what `requests` ask of `logits` into `output`, with the kernel of the logits' device."""
    _kernel(logits.device.type).fill(logits, requests, output)


@functools.cache
def _kernel(device_type: str) -> ModuleType:
    return import_module(_MODULES[kernel_of(device_type)])
