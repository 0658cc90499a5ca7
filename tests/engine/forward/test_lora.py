"""LoRA products by the panel kernels, against float64 and torch."""

from __future__ import annotations

import pytest
import torch

from logprobe.engine.forward.lora import by_panels, by_torch
from logprobe.models.lora import LowRank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
@pytest.mark.parametrize(
    ("inputs", "rank", "outputs"), [(5, 1, 7), (96, 16, 64), (300, 48, 1000), (64, 65, 50), (96, 96, 96)]
)
def test_products_are_those_of_the_matrices_and_of_each_row_alone(
    inputs: int, rank: int, outputs: int, num_rows: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rank)
    down, up = (torch.randn(*shape, generator=generator) for shape in ((inputs, rank), (rank, outputs)))
    part = LowRank(down.to(dtype).float(), up.to(dtype).float())  # as when loaded
    wide = torch.randn(num_rows, inputs + 3, generator=generator)
    x = wide[:, :inputs]  # strided rows
    want = x.double() @ part.down.double() @ part.up.double()
    got = by_panels(part, x)
    scale = want.abs().max()
    torch.testing.assert_close(got.double() / scale, want / scale, rtol=0, atol=5e-6)
    torch.testing.assert_close(by_torch(part, x).double() / scale, want / scale, rtol=0, atol=5e-6)
    alone = torch.cat([by_panels(part, row[None].contiguous()) for row in x])
    assert torch.equal(got, alone)
