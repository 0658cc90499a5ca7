"""Arrays as torch tensors, for models that transformers runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


def as_tensor(values: NDArray[Any] | torch.Tensor) -> torch.Tensor:
    """Return an array as a tensor that shares its memory; torch cannot read bfloat16 arrays itself.

    A tensor is returned as it is.
    """
    if isinstance(values, torch.Tensor):
        return values
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
