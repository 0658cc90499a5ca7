"""LoRA products by the panel kernels, against float64 and torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from logprobe.engine.forward.cpu.lora import by_panels
from logprobe.engine.forward.torch.transformers_lora import by_torch
from logprobe.kernels.placement import as_tensor
from logprobe.models.lora import LowRank


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
@pytest.mark.parametrize(
    ("inputs", "rank", "outputs"), [(5, 1, 7), (96, 16, 64), (300, 48, 1000), (64, 65, 50), (96, 96, 96)]
)
def test_products_are_those_of_the_matrices_and_of_each_row_alone(
    inputs: int, rank: int, outputs: int, num_rows: int, dtype: type
) -> None:
    rng = np.random.default_rng(rank)
    down, up = (rng.normal(size=shape).astype(np.float32) for shape in ((inputs, rank), (rank, outputs)))
    part = LowRank(*(one.astype(dtype).astype(np.float32) for one in (down, up)))  # as when loaded
    x = rng.normal(size=(num_rows, inputs + 3)).astype(np.float32)[:, :inputs]  # strided rows
    want = x.astype(np.float64) @ part.down.astype(np.float64) @ part.up.astype(np.float64)
    got = by_panels(part, x)
    scale = np.abs(want).max()
    np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=5e-6)
    by_tensors = by_torch(part.mapped(as_tensor), as_tensor(x)).numpy()
    np.testing.assert_allclose(by_tensors / scale, want / scale, rtol=0, atol=5e-6)
    alone = np.concatenate([by_panels(part, row[None]) for row in x])
    assert np.array_equal(got, alone)
