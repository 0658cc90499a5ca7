"""The extraction on the CPU: one pass over each row, rows shared out among torch's threads.

Before it: checked requests. After it: output rows, filled in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from logprobe.kernels.threads.parallel import parallel_for, worker_of

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.extraction.api import RowRequests
    from logprobe.records.rows import DeviceRows

worker = worker_of("extraction.rows")
PARALLEL_FROM = 2**15  # logits from which a second thread pays for its start
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def fill(logits: Tensor, requests: RowRequests, output: DeviceRows) -> None:
    """Writes what `requests` ask of `logits` (B, V) into `output`; all on the CPU."""
    logits = logits.detach()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    given = output.given
    context = [
        logits.data_ptr(),
        logits.stride(0) * logits.element_size(),
        requests.vocab_size,
        KINDS[logits.dtype],
        requests.chosen_ids.data_ptr(),
        requests.num_logprobs.data_ptr(),
        output.token_ids.data_ptr(),
        output.logprobs.data_ptr(),
        requests.width,
        output.ranks.data_ptr(),
        output.lse.data_ptr(),
        output.is_valid.data_ptr(),
        0 if output.entropy is None else output.entropy.data_ptr(),
    ]
    if given is not None:
        arrays = (given.offsets, given.token_ids, given.logprobs, given.ranks)
        context += [array.data_ptr() for array in arrays]
    else:
        context += [0] * 4
    columns = map(output.extras.get, ("varentropy", "margin"))
    context += [0 if column is None else column.data_ptr() for column in columns]
    is_small = logits.numel() < PARALLEL_FROM
    parallel_for(worker(), context, len(logits), num_threads=1 if is_small else None)
