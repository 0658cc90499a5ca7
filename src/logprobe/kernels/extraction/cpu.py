"""The extraction on the CPU: one pass over each row, rows shared out among torch's threads.

Before it: checked requests. After it: output rows, filled in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from logprobe.kernels.native import ExtractArgs
from logprobe.kernels.threads.parallel import Stage, address

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.extraction.api import RowRequests
    from logprobe.records.rows import DeviceRows

PARALLEL_FROM = 2**15  # logits from which a second thread pays for its start
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def fill(logits: Tensor, requests: RowRequests, output: DeviceRows) -> None:
    """Writes what `requests` ask of `logits` (B, V) into `output`; all on the CPU."""
    logits = logits.detach()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    given = output.given
    work = ExtractArgs(
        num_items=len(logits),
        logits=logits.data_ptr(),
        row_bytes=logits.stride(0) * logits.element_size(),
        vocab_size=requests.vocab_size,
        kind=KINDS[logits.dtype],
        chosen=requests.chosen_ids.data_ptr(),
        num_logprobs=requests.num_logprobs.data_ptr(),
        token_ids=output.token_ids.data_ptr(),
        logprobs=output.logprobs.data_ptr(),
        width=requests.width,
        ranks=output.ranks.data_ptr(),
        lse=output.lse.data_ptr(),
        is_valid=output.is_valid.data_ptr(),
        entropy=address(output.entropy),
        varentropy=address(output.extras.get("varentropy")),
        margin=address(output.extras.get("margin")),
        given_offsets=None if given is None else given.offsets.data_ptr(),
        given_ids=None if given is None else given.token_ids.data_ptr(),
        given_logprobs=None if given is None else given.logprobs.data_ptr(),
        given_ranks=None if given is None else given.ranks.data_ptr(),
    )
    Stage("extract", work, (), is_small=logits.numel() < PARALLEL_FROM).run()
