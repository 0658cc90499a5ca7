"""Extract top-k or given ids from rows of log-probabilities, as NumPy arrays or torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from logprobe.errors import ParameterError
from logprobe.kernels.extraction.api import LOGITS_DTYPES, check_ids, check_rows, extract
from logprobe.records.rows import host_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from logprobe.kernels.extraction.api import IdsLike

    Array = NDArray[Any]

Rows = TypeVar("Rows", "Tensor", "Array")


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
    """Return the k most probable ids and their log-probabilities, descending, ties by ascending id.

    Args:
        logprobs: (B, V) or (V,), float64, float32, float16 or bfloat16, a torch tensor or NumPy array, nats;
            not normalised again.
        k: number of ids; -1 is the whole vocabulary, more than V gives V.
        logprobs_first: return the log-probabilities before the ids.

    Returns:
        ids (B, k) int32 and log-probabilities (B, k), or (k,) each, with the array type and dtype of
        `logprobs`; rows that contain NaN or +inf, or only -inf, have NaN and id 0.

    Raises:
        ParameterError: a wrong shape or dtype, or k < -1.
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
    """Return the log-probabilities of given token ids as host arrays; only these are copied to the host.

    Args:
        logprobs: (B, V) or (V,), float64, float32, float16 or bfloat16, a torch tensor or NumPy array, nats,
            on any device.
        token_ids: (B, n) token ids, or (B,), one per row; (n,) for a single row (V,).

    Returns:
        token_ids int32 and their log-probabilities, both of the shape of `token_ids`; float64 if `logprobs`
        is float64, otherwise float32.

    Raises:
        ParameterError: a wrong shape or dtype, or an id outside the vocabulary.
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


def extract_top_k_logprobs_rust(logprobs: Rows, k: int) -> tuple[Rows, Rows]:
    """Return the same as `extract_top_k_logprobs`, with log-probabilities first (for compatibility).

    Raises:
        ParameterError: as in `extract_top_k_logprobs`.
    """
    values, ids = extract_top_k_logprobs(logprobs, k, logprobs_first=True)
    return values, ids


def batch_logprobs_to_cpu_rust(
    logprobs: Tensor | Array, token_ids: Tensor | Array
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Copy log-probabilities (nats) and their token ids to NumPy arrays.

    Args:
        logprobs: any shape, a torch tensor or NumPy array, on any device; bfloat16 becomes float32.
        token_ids: same shape as `logprobs`, or its leading dimensions.

    Raises:
        ParameterError: the shape of `token_ids` is not a prefix of that of `logprobs`.
    """
    if tuple(logprobs.shape[: token_ids.ndim]) != tuple(token_ids.shape):
        raise ParameterError(
            "token_ids", f"shape {tuple(token_ids.shape)} is no prefix of logprobs {tuple(logprobs.shape)}"
        )
    return host_array(logprobs), host_array(token_ids)


def _rows(logprobs: object) -> Tensor:
    """Convert (B, V) or (V,) log-probabilities to a (B, V) tensor.

    Raises:
        ParameterError: not an array of floats with one or two dimensions and V >= 1.
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
