"""Arrays as torch tensors, for models that transformers runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor that shares its memory; torch cannot read bfloat16 arrays itself."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
