"""Extraction functions named `..._rust`, which return log-probabilities before token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from logprobe.errors import ParameterError
from logprobe.kernels.extraction.rows import extract_top_k_logprobs
from logprobe.records.rows import host_array

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Array = NDArray[Any]

Rows = TypeVar("Rows", "Tensor", "Array")


def extract_top_k_logprobs_rust(logprobs: Rows, k: int) -> tuple[Rows, Rows]:
    """Return the log-probabilities and the ids of the k most probable tokens in each row.

    `kernels.extract_top_k_logprobs` returns the same two arrays in the other order.

    Raises:
        ParameterError: `logprobs` has a wrong shape or dtype, or k < -1.
    """
    ids, values = extract_top_k_logprobs(logprobs, k)
    return values, ids


def batch_logprobs_to_cpu_rust(
    logprobs: Tensor | Array, token_ids: Tensor | Array
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Copy log-probabilities (nats) and their token ids to NumPy arrays.

    Args:
        logprobs: log-probabilities of any shape, a torch tensor on any device or a NumPy array; bfloat16 is
            converted to float32.
        token_ids: token ids, with the shape of `logprobs` or the leading dimensions of that shape.

    Raises:
        ParameterError: the shape of `token_ids` is not a prefix of the shape of `logprobs`.
    """
    if tuple(logprobs.shape[: token_ids.ndim]) != tuple(token_ids.shape):
        whole, own = tuple(logprobs.shape), tuple(token_ids.shape)
        raise ParameterError(
            "token_ids",
            f"has shape {own}, which must be the leading dimensions of logprobs, of shape {whole}",
        )
    return host_array(logprobs), host_array(token_ids)
