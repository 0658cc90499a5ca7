"""Runs the output head and the extraction on chunks of rows, so that (T, V) logits are never allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.errors import ParameterError
from logprobe.kernels.extraction.api import allocate_for, fill
from logprobe.kernels.extraction.requests import check_requests, check_rows
from logprobe.kernels.placement import as_rows, inference_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.kernels.extraction.requests import GivenLike, IdsLike
    from logprobe.kernels.placement import Rows
    from logprobe.records.rows import DeviceRows

CHUNK_BYTES = 8 * 2**20
MIN_CHUNK_ROWS = 32  # with fewer rows, the head's weights are read too often
MAX_CHUNK_BYTES = 32 * 2**20
GPU_CHUNK_BYTES = 128 * 2**20  # larger than on a CPU, to launch fewer kernels; caches would not help


def head_extract(
    hidden: Rows,
    head: Callable[[Any], Rows],
    chosen_ids: IdsLike,
    k: int | IdsLike,
    *,
    given_ids: GivenLike = None,
    chunk_rows: int | None = None,
    transform: Callable[[Any, slice], Rows] | None = None,
    **extras: bool,
) -> DeviceRows:
    """Return `extract(head(hidden), ...)`, but hold only one chunk of logits at a time.

    Args:
        hidden: (T, H) final hidden states, an array or a torch tensor, whichever `head` takes.
        head: computes (rows, V) logits from (rows, H) hidden states, including the model's scale and soft
            cap. The first chunk has 32 rows if `chunk_rows` is None and `head` has no attribute
            `out_features` (`nn.Linear` has one).
        chosen_ids: (T,) token ids, for column 0.
        k: see `extract`.
        given_ids: see `extract`.
        chunk_rows: rows per chunk; None: see `default_chunk_rows`.
        transform: called with each chunk's logits and the slice of its rows in `hidden`; returns (rows, V)
            logits that are used instead.
        **extras: see `extract`.

    Raises:
        ParameterError: an argument is invalid; see `extract`.

    Errors raised by `head` and `transform` are not caught.
    """
    num_rows = _check_hidden(hidden)
    if chunk_rows is not None and chunk_rows < 1:
        raise ParameterError("chunk_rows", f"must be 1 or more, not {chunk_rows}")
    device = "cpu" if isinstance(hidden, np.ndarray) else hidden.device.type
    size = chunk_rows or default_chunk_rows(getattr(head, "out_features", None), device)
    output = None
    start = 0
    while output is None or start < num_rows:
        rows = slice(start, min(start + size, num_rows))
        with inference_mode(hidden):
            logits = head(hidden[rows])
            if transform is not None:
                logits = transform(logits, rows)
        logits = as_rows(logits)
        if output is None:
            shape = (num_rows, check_rows(logits)[1])
            requests = check_requests(shape, chosen_ids, k, given_ids=given_ids, **extras)
            output = allocate_for(logits, requests)
            size = chunk_rows or default_chunk_rows(shape[1], device)
        fill(logits, requests.rows(rows.start, rows.stop), output.rows(rows.start, rows.stop))
        start = rows.stop
        del logits  # otherwise two chunks would exist while the head runs
    return output


def default_chunk_rows(vocab_size: int | None, device_type: str = "cpu") -> int:
    """Return the default number of rows per chunk of float32 logits.

    On a CPU, this is as many rows as fit in 8 MiB; if fewer than 32 fit, it is 32, or as many as fit in 32
    MiB if that is less. On a GPU, it is as many rows as fit in 128 MiB. The result is at least 1; without
    `vocab_size` it is 32.
    """
    if vocab_size is None:
        return MIN_CHUNK_ROWS
    row_bytes = 4 * vocab_size
    if device_type == "cuda":
        return max(GPU_CHUNK_BYTES // row_bytes, 1)
    rows = CHUNK_BYTES // row_bytes
    if rows < MIN_CHUNK_ROWS:
        rows = min(MIN_CHUNK_ROWS, MAX_CHUNK_BYTES // row_bytes)
    return max(rows, 1)


def _check_hidden(hidden: Rows) -> int:
    if hidden.ndim != 2:
        raise ParameterError("hidden", f"must have shape (T, H), not {tuple(hidden.shape)}")
    return hidden.shape[0]
