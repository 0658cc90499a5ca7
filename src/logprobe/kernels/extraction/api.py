"""Computes log-probabilities, ranks, top-k and extra columns from rows of logits.

The device of the logits selects the kernel: NumPy arrays and tensors on the CPU use the native library, and
tensors on other devices use `kernels.extraction.device`, which needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.kernels.extraction.requests import allocate, check_requests, check_rows
from logprobe.kernels.info import native_library
from logprobe.kernels.placement import as_rows
from logprobe.kernels.stages import Stage

if TYPE_CHECKING:
    from logprobe.kernels.arrays import Array
    from logprobe.kernels.extraction.requests import GivenLike, IdsLike, RowRequests
    from logprobe.kernels.placement import Rows
    from logprobe.records.rows import DeviceRows

PARALLEL_FROM = 2**15  # number of logits from which more than one thread is faster
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}


def extract(
    logits: Rows,
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
        logits: (B, V) float32, float16 or bfloat16, any strides: a torch tensor or a NumPy array, whose
            bfloat16 is that of `ml_dtypes`.
        chosen_ids: (B,) token ids, one per row, reported in column 0.
        k: number of most probable tokens to report: one number, or (B,) numbers, one per row. 0: the chosen
            token only; -1 or more than V: the whole vocabulary.
        given_ids: further token ids to report with log-probability and rank: a 1-D array for all rows, or a
            sequence of B arrays (or None), one per row.
        **extras: extra columns to compute, by name, such as `entropy=True`.

    Returns:
        NumPy arrays, or tensors on the logits' device if that is not the CPU.

    Raises:
        ParameterError: an argument has a wrong shape or dtype, an id is outside the vocabulary, k < -1, or an
            extra column is unknown.
    """
    return extract_checked(
        logits, check_requests(check_rows(logits), chosen_ids, k, given_ids=given_ids, **extras)
    )


def extract_checked(logits: Rows, requests: RowRequests) -> DeviceRows:
    """Do the same as `extract`, with arguments that `check_requests` has validated."""
    logits = as_rows(logits)
    output = allocate_for(logits, requests)
    fill(logits, requests, output)
    return output


def fill(logits: Rows, requests: RowRequests, output: DeviceRows) -> None:
    """Compute what `requests` ask for from (B, V) logits, and write it to `output` on the same device.

    Uses the kernel for the device of the logits.
    """
    logits = as_rows(logits)
    if not isinstance(logits, np.ndarray):
        from logprobe.kernels.extraction import device

        if device.has_kernel(logits):
            from logprobe.kernels.extraction import triton

            with device.current_of(logits):
                triton.fill(logits, requests, output)
        else:
            device.copy(extract_checked(logits.detach().cpu(), device.on_host(requests)), output)
    elif native_library() is None:
        from logprobe.kernels.extraction import reference

        reference.fill(logits, requests, output)
    else:
        _fill_on_cpu(logits, requests, output)


def _fill_on_cpu(logits: Array, requests: RowRequests, output: DeviceRows) -> None:
    """Do the same as `fill`, for arrays, with the native library."""
    if logits.strides[1] != logits.itemsize:
        logits = np.ascontiguousarray(logits)
    given = output.given
    Stage(
        "extract",
        "ExtractArgs",
        num_items=len(logits),
        is_small=logits.size < PARALLEL_FROM,
        logits=logits,
        vocab_size=requests.vocab_size,
        kind=KINDS[logits.dtype.name],
        chosen=requests.chosen_ids,
        num_logprobs=requests.num_logprobs,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        width=requests.width,
        ranks=output.ranks,
        lse=output.lse,
        is_valid=output.is_valid,
        entropy=output.entropy,
        varentropy=output.extras.get("varentropy"),
        margin=output.extras.get("margin"),
        given_offsets=None if given is None else given.offsets,
        given_ids=None if given is None else given.token_ids,
        given_logprobs=None if given is None else given.logprobs,
        given_ranks=None if given is None else given.ranks,
    ).run()


def allocate_for(logits: Rows, requests: RowRequests) -> DeviceRows:
    """Allocate the output for `requests` on the device of the logits; see `allocate`."""
    if isinstance(logits, np.ndarray):
        return allocate(requests)
    from logprobe.kernels.extraction import device

    return device.allocate(requests, logits.device)
