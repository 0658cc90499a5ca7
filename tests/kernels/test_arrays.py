import ml_dtypes
import numpy as np
import pytest
import torch

from logprobe.kernels.arrays import as_array


def test_an_array_is_returned_as_it_is() -> None:
    array = np.ones(3)
    assert as_array(array) is array


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.bfloat16])
def test_a_tensor_shares_its_memory_and_strides(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)[:, 1:]
    array = as_array(tensor)
    assert (array.shape, array.strides) == ((3, 3), (4 * dtype.itemsize, dtype.itemsize))
    assert array.astype(np.float64).tolist() == tensor.double().tolist()
    tensor[2, 2] = 0
    assert array[2, 2] == 0


def test_bfloat16_keeps_its_bits() -> None:
    array = as_array(torch.tensor([1.0, -2.5, torch.inf], dtype=torch.bfloat16).requires_grad_())
    assert array.dtype == ml_dtypes.bfloat16
    assert array.tolist() == [1.0, -2.5, float("inf")]
