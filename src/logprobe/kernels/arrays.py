"""NumPy arrays as the input of kernels, and the conversion of CPU tensors to arrays without a copy."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


def as_array(values: Any) -> Array:
    """Return an array itself, or a torch tensor on the CPU as an array that shares the tensor's memory.

    A bfloat16 tensor becomes an array of dtype `ml_dtypes.bfloat16`, because NumPy has no bfloat16.
    """
    if isinstance(values, np.ndarray):
        return values
    tensor = values.detach()
    if str(tensor.dtype) != "torch.bfloat16":
        array: Array = tensor.numpy()
        return array
    import ml_dtypes

    bits: Array = tensor.view(sys.modules["torch"].int16).numpy()
    return bits.view(ml_dtypes.bfloat16)
