"""Rows of logits on the host (NumPy arrays) or on another device (torch tensors).

Indexing, comparison and arithmetic in place are written in the same way for both, so most code needs only the
functions of this module. They import torch only if a tensor is given.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from logprobe.errors import MissingPackageError
from logprobe.kernels.arrays import Array, as_array

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    Rows: TypeAlias = Array | Tensor


def is_array(values: object) -> bool:
    """Return True for a NumPy array or a torch tensor."""
    return isinstance(values, np.ndarray) or hasattr(values, "detach")


def copied(rows: Any) -> Any:
    """Return a contiguous copy of an array or a tensor."""
    return rows.copy() if isinstance(rows, np.ndarray) else rows.contiguous().clone()


def as_rows(values: Any) -> Any:
    """Return a tensor on the CPU as an array that shares its memory; arrays and other tensors unchanged."""
    is_on_cpu = isinstance(values, np.ndarray) or values.device.type == "cpu"
    return as_array(values) if is_on_cpu else values


def as_tensor(values: Any) -> Any:
    """Return an array as a torch tensor that shares its memory; a tensor unchanged."""
    if not isinstance(values, np.ndarray):
        return values
    import torch

    if values.dtype.name != "bfloat16":
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)


def like(values: Array, rows: Rows) -> Any:
    """Return `values` itself if `rows` is an array, else as a tensor on the device of `rows`.

    Tensors of floats also get the dtype of `rows`.
    """
    if isinstance(rows, np.ndarray):
        return values
    import torch

    tensor = torch.from_numpy(values)
    return tensor.to(rows) if tensor.is_floating_point() else tensor.to(rows.device)


def inference_mode(rows: Rows) -> AbstractContextManager[Any]:
    """Return `torch.inference_mode()` if `rows` is a tensor, else a context manager that does nothing."""
    if isinstance(rows, np.ndarray):
        return nullcontext()
    import torch

    return torch.inference_mode()


def torch_for(purpose: str) -> Any:
    """Import and return torch; `purpose` says in the plural what needs it, such as `models on a GPU`.

    Raises:
        MissingPackageError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingPackageError(f"{purpose} need torch; pip install 'logprobe[torch]'") from error
    return torch
