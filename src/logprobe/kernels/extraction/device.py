"""Extraction from tensors on a device other than the CPU: in Triton on a GPU, otherwise on the host.

Tensors on the CPU are accepted as well, so that Triton's interpreter can run the kernels.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.kernels.extraction.requests import allocate as allocate_columns
from logprobe.kernels.info import kernel_of
from logprobe.records.rows import host_array

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from logprobe.kernels.extraction.requests import RowRequests
    from logprobe.records.rows import Column, DeviceRows


def has_kernel(logits: Tensor) -> bool:
    """Return True if a kernel runs on the device of the logits."""
    return kernel_of(logits.device.type) == "triton"


def current_of(logits: Tensor) -> AbstractContextManager[object]:
    """Make the GPU of the logits the current one, on which Triton launches its kernels."""
    context: AbstractContextManager[object] = torch.cuda.device_of(logits)  # type: ignore[no-untyped-call]
    return context


def copy_to(values: Column, device: torch.device) -> Tensor:
    """Copy an array or tensor to `device`; from the host to a GPU asynchronously, through pinned memory."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if tensor.device.type == "cpu" and device.type == "cuda" and tensor.numel():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def requests_on(requests: RowRequests, device: torch.device) -> RowRequests:
    """Return the same requests with every array as a tensor on `device`."""
    return requests.mapped(partial(copy_to, device=device))


def allocate(requests: RowRequests, device: torch.device) -> DeviceRows:
    """Allocate the columns for `requests` as tensors on `device`, as `extraction.requests.allocate` does."""

    def empty(shape: Any, dtype: str) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    return allocate_columns(requests, empty=empty, put=partial(copy_to, device=device))


def on_host(requests: RowRequests) -> RowRequests:
    """Return the same requests with NumPy arrays."""
    return requests.mapped(host_array)


def copy(source: DeviceRows, rows: DeviceRows) -> None:
    """Copy the columns that a kernel writes, from arrays (`source`) to tensors on a device (`rows`)."""
    target: Any = rows
    for name in ("token_ids", "logprobs", "ranks", "lse", "is_valid"):
        getattr(target, name).copy_(torch.from_numpy(getattr(source, name)))
    for name, column in source.extras.items():
        target.extras[name].copy_(torch.from_numpy(column))
    if source.given is not None and target.given is not None:
        own = slice(int(source.given.offsets[0]), int(source.given.offsets[-1]))  # of these rows only
        target.given.logprobs[own].copy_(torch.from_numpy(source.given.logprobs[own]))
        target.given.ranks[own].copy_(torch.from_numpy(source.given.ranks[own]))
