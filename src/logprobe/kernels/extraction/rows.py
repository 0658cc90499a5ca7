"""Looks up the top k or given token ids in rows of log-probabilities (NumPy arrays or torch tensors)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from logprobe.errors import ParameterError
from logprobe.kernels.extraction.api import LOGITS_DTYPES, check_ids, check_rows, extract

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from logprobe.kernels.extraction.api import IdsLike

    Array = NDArray[Any]


@overload
def extract_top_k_logprobs(
    logprobs: Tensor, k: int, *, logprobs_first: bool = False
) -> tuple[Tensor, Tensor]: ...
@overload
def extract_top_k_logprobs(
    logprobs: Array, k: int, *, logprobs_first: bool = False
) -> tuple[Array, Array]: ...
def extract_top_k_logprobs(
    logprobs: Tensor | Array, k: int, *, logprobs_first: bool = False
) -> tuple[Tensor, Tensor] | tuple[Array, Array]:
    """Return the ids and log-probabilities of the k most probable tokens in each row.

    Tokens are ordered by descending log-probability, and by ascending id among equals.

    Args:
        logprobs: (B, V) or (V,) log-probabilities in nats, a torch tensor or NumPy array of dtype float64,
            float32, float16 or bfloat16; they are not normalized.
        k: number of tokens; -1 or more than V means the whole vocabulary.
        logprobs_first: return the log-probabilities before the ids.

    Returns:
        Token ids, (B, k) int32, and log-probabilities, (B, k) in the dtype of `logprobs`; (k,) for a single
        row. Both are torch tensors or NumPy arrays, like `logprobs`. Rows that contain NaN or +inf, or only
        -inf, get id 0 and NaN.

    Raises:
        ParameterError: `logprobs` has a wrong shape or dtype, or k < -1.
    """
    rows = _rows(logprobs)
    narrow = rows if rows.dtype in LOGITS_DTYPES else rows.float()
    top = extract(narrow, np.zeros(check_rows(narrow, "logprobs")[0], np.int32), int(k))
    ids, is_valid = top.token_ids[:, 1:], top.is_valid
    if rows.dtype == torch.float64:
        # Different values may be equal in float32, so sort whole rows in float64.
        is_valid = (rows < torch.inf).all(1) & (rows > -torch.inf).any(1)
        order = rows.sort(dim=1, descending=True, stable=True).indices[:, : ids.shape[1]]
        ids = order.to(torch.int32).masked_fill(~is_valid[:, None], 0)
    values = rows.gather(1, ids.long()).masked_fill(~is_valid[:, None], torch.nan)
    found = [ids, values] if logprobs.ndim == 2 else [ids[0], values[0]]
    first, second = reversed(found) if logprobs_first else found
    return (first, second) if isinstance(logprobs, Tensor) else (first.numpy(), second.numpy())


def batch_logprobs_to_host(
    logprobs: Tensor | Array, token_ids: IdsLike
) -> tuple[NDArray[np.int32], NDArray[np.floating]]:
    """Return the log-probabilities of given token ids as NumPy arrays.

    Only the values of these ids are copied from the device.

    Args:
        logprobs: (B, V) or (V,) log-probabilities in nats, a torch tensor on any device or a NumPy array, of
            dtype float64, float32, float16 or bfloat16.
        token_ids: (B, n) token ids, or (B,) for one id per row; (n,) if `logprobs` is a single row.

    Returns:
        The token ids as int32, and their log-probabilities, both with the shape of `token_ids`. The
        log-probabilities are float64 if `logprobs` is, otherwise float32.

    Raises:
        ParameterError: an argument has a wrong shape or dtype, or an id is outside the vocabulary.
    """
    rows = _rows(logprobs)
    num_rows, vocab_size = rows.shape
    ids = check_ids(token_ids, vocab_size, "token_ids")
    is_one_row = logprobs.ndim == 1
    if ids.ndim not in ({1} if is_one_row else {1, 2}) or (not is_one_row and len(ids) != num_rows):
        expected = "(n,)" if is_one_row else f"({num_rows}, n) or ({num_rows},)"
        raise ParameterError("token_ids", f"must have shape {expected}, not {ids.shape}")
    index = torch.from_numpy(ids.astype(np.int64).reshape(num_rows, -1)).to(rows.device)
    values = rows.gather(1, index)
    values = values if rows.dtype == torch.float64 else values.float()
    return ids, values.cpu().numpy().reshape(ids.shape)


def _rows(logprobs: object) -> Tensor:
    """Convert (B, V) or (V,) log-probabilities to a (B, V) tensor.

    Raises:
        ParameterError: `logprobs` is not an array of floats with one or two dimensions and V >= 1.
    """
    if not isinstance(logprobs, Tensor | np.ndarray):
        raise ParameterError("logprobs", f"must be a torch or NumPy array, not {type(logprobs).__name__}")
    kinds = (*LOGITS_DTYPES, torch.float64, np.float16, np.float32, np.float64)
    if logprobs.dtype not in kinds:
        raise ParameterError(
            "logprobs", f"must be float16, bfloat16, float32 or float64, not {logprobs.dtype}"
        )
    if logprobs.ndim not in {1, 2} or not logprobs.shape[-1]:
        raise ParameterError("logprobs", f"must be (B, V) or (V,) with V >= 1, not {tuple(logprobs.shape)}")
    rows = (
        logprobs.detach()
        if isinstance(logprobs, Tensor)
        else torch.from_numpy(np.ascontiguousarray(logprobs))
    )
    return rows if rows.ndim == 2 else rows[None]
