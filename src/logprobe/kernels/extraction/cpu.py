"""Extraction on the CPU: one pass over each row, with rows in parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.kernels.stages import Stage

if TYPE_CHECKING:
    from logprobe.kernels.arrays import Array
    from logprobe.kernels.extraction.requests import RowRequests
    from logprobe.records.rows import DeviceRows

PARALLEL_FROM = 2**15  # number of logits from which more than one thread is faster
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}


def fill(logits: Array, requests: RowRequests, output: DeviceRows) -> None:
    """Compute what `requests` ask for from (B, V) logits, and write it to `output`; all on the CPU."""
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
