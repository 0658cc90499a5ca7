"""Rows of log-probabilities that the caller already has → the few of them that are wanted.

Before it: any (B, V) log-probabilities. After it: the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from logprobe.errors import ParameterError
from logprobe.kernels.extraction import extract
from logprobe.kernels.requests import check_ids, check_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.kernels.requests import IdsLike


def extract_top_k_logprobs(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable ids of each row and their log-probabilities, descending, ties by ascending id.

    Args:
        logprobs: (B, V) float32, float16 or bfloat16, nats; taken as they are, not normalised again.
        k: how many; -1 is the whole vocabulary, more than V gives V.

    Returns:
        ids (B, k) int32 and log-probabilities (B, k) of the same dtype as `logprobs`; a row that holds NaN
        or +inf, or nothing but -inf, has NaN and id 0.

    Raises:
        ParameterError: a shape or dtype that does not fit, k < -1.
    """
    num_rows, _ = check_rows(logprobs, "logprobs")
    top = extract(logprobs, np.zeros(num_rows, dtype=np.int32), int(k))
    ids = top.token_ids[:, 1:]
    values = logprobs.detach().gather(1, ids.long())
    return ids, values.masked_fill(~top.is_valid[:, None], torch.nan)


def batch_logprobs_to_host(
    logprobs: Tensor, token_ids: IdsLike
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The log-probabilities of named token ids, as host arrays: nothing else leaves the device.

    Args:
        logprobs: (B, V) float32, float16 or bfloat16, nats, on any device.
        token_ids: (B, n) token ids.

    Returns:
        token_ids (B, n) int32 and their log-probabilities (B, n) float32.

    Raises:
        ParameterError: a shape or dtype that does not fit, an id outside the vocabulary.
    """
    num_rows, vocab_size = check_rows(logprobs, "logprobs")
    ids = check_ids(token_ids, vocab_size, "token_ids")
    if ids.ndim != 2 or len(ids) != num_rows:
        raise ParameterError("token_ids", f"must have shape ({num_rows}, n), not {ids.shape}")
    index = torch.from_numpy(ids.astype(np.int64)).to(logprobs.device)
    return ids, logprobs.detach().gather(1, index).float().cpu().numpy()
