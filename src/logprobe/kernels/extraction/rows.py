"""Looks up the top k or given token ids in rows of log-probabilities (NumPy arrays or torch tensors)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from logprobe.errors import ParameterError
from logprobe.kernels.extraction.api import extract_checked
from logprobe.kernels.extraction.requests import LOGITS_DTYPES, check_ids, check_requests, dtype_of
from logprobe.kernels.placement import as_rows, as_tensor, is_array, like
from logprobe.records.rows import host_array

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.kernels.extraction.requests import IdsLike
    from logprobe.kernels.placement import Rows

    Array = NDArray[Any]

Same = TypeVar("Same", "Tensor", "Array")


def extract_top_k_logprobs(logprobs: Same, k: int) -> tuple[Same, Same]:
    """Return the ids and log-probabilities of the k most probable tokens in each row.

    Tokens are ordered by descending log-probability, and by ascending id among equals.

    Args:
        logprobs: (B, V) or (V,) log-probabilities in nats, a torch tensor or NumPy array of dtype float64,
            float32, float16 or bfloat16; they are not normalized.
        k: number of tokens; -1 or more than V means the whole vocabulary.

    Returns:
        Token ids, (B, k) int32, and log-probabilities, (B, k) in the dtype of `logprobs`; (k,) for a single
        row. Both are torch tensors or NumPy arrays, like `logprobs`. Rows that contain NaN or +inf, or only
        -inf, get id 0 and NaN.

    Raises:
        ParameterError: `logprobs` has a wrong shape or dtype, or k < -1.
    """
    rows = _rows(logprobs)
    requests = check_requests((len(rows), rows.shape[1]), np.zeros(len(rows), np.int32), int(k))
    if dtype_of(rows) == "float64":
        ids, is_valid = _sorted(rows, requests.width - 1)
    else:
        top = extract_checked(rows, requests)
        ids, is_valid = top.token_ids[:, 1:], top.is_valid
    values = rows[like(np.arange(len(rows))[:, None], rows), ids]
    values[~is_valid] = np.nan
    if logprobs.ndim == 1:
        ids, values = ids[0], values[0]
    return (ids, values) if isinstance(logprobs, np.ndarray) else (as_tensor(ids), as_tensor(values))


def batch_logprobs_to_host(
    logprobs: Rows, token_ids: IdsLike
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
    index = ids.reshape(num_rows, -1)
    values = host_array(rows[like(np.arange(num_rows)[:, None], rows), like(index, rows)])
    return ids, values.astype(np.result_type(values, np.float32)).reshape(ids.shape)


def _sorted(rows: Any, num: int) -> tuple[Any, Any]:
    """Return the ids of the `num` largest values in each row, and which rows are valid.

    The rows are sorted here, because float64 values that differ may be equal in float32, in which the kernels
    compute.
    """
    values = host_array(rows)
    is_valid: NDArray[np.bool_] = np.isfinite(values.max(1))  # NaN if the row contains one
    ids = np.argsort(-values, axis=1, kind="stable")[:, :num].astype(np.int32)
    ids[~is_valid] = 0
    return like(ids, rows), like(is_valid, rows)


def _rows(logprobs: Any) -> Any:
    """Convert (B, V) or (V,) log-probabilities to (B, V) rows.

    Raises:
        ParameterError: `logprobs` is not an array of floats with one or two dimensions and V >= 1.
    """
    if not is_array(logprobs):
        raise ParameterError("logprobs", f"must be a torch or NumPy array, not {type(logprobs).__name__}")
    if dtype_of(logprobs) not in (*LOGITS_DTYPES, "float64"):
        raise ParameterError(
            "logprobs", f"must be float16, bfloat16, float32 or float64, not {logprobs.dtype}"
        )
    if logprobs.ndim not in {1, 2} or not logprobs.shape[-1]:
        raise ParameterError("logprobs", f"must be (B, V) or (V,) with V >= 1, not {tuple(logprobs.shape)}")
    rows = as_rows(logprobs if isinstance(logprobs, np.ndarray) else logprobs.detach())
    return rows if rows.ndim == 2 else rows[None]
