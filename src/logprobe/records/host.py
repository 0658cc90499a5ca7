"""Tensors → arrays on the host: at once, or in two so that other work goes on meanwhile.

Before it: `DeviceRows` on whatever device. After it: `HostRows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from logprobe.records.store.columns import Array

Send: TypeAlias = "Callable[[Tensor], Callable[[], Tensor]]"
"""Begins to copy a tensor to the host; what it returns waits for the copy and gives it."""


def on_host(tensors: Sequence[Tensor]) -> list[Array]:
    """Tensors as arrays: views of what lies on the CPU, one packed copy of what lies elsewhere."""
    return arriving(tensors, lambda packed: packed.cpu)()


def arriving(tensors: Sequence[Tensor], send: Send) -> Callable[[], list[Array]]:
    """`on_host` in two: what lies elsewhere is packed and sent now, and what is returned waits for it."""
    import torch

    if all(tensor.device.type == "cpu" for tensor in tensors):
        return lambda: [tensor.numpy() for tensor in tensors]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    # Each begins at a multiple of 8 bytes, so that its view is aligned.
    starts = np.cumsum([0, *(-(-size // 8) * 8 for size in sizes)]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.uint8, device=tensors[0].device)
    for tensor, start, size in zip(tensors, starts, sizes, strict=False):
        packed[start : start + size] = tensor.contiguous().view(-1).view(torch.uint8)
    arrive = send(packed)

    def arrays() -> list[Array]:
        data = arrive()
        return [
            data[start : start + size].view(tensor.dtype).view(tensor.shape).numpy()
            for tensor, start, size in zip(tensors, starts, sizes, strict=False)
        ]

    return arrays
