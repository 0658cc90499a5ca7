"""Extraction from tensors on a device other than the CPU: in Triton on a GPU, otherwise on the host.

Tensors on the CPU are accepted as well, with which Triton's interpreter runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.kernels.info import kernel_of
from logprobe.records.rows import DeviceRows, GivenLogprobs, host_array

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from logprobe.kernels.extraction.requests import RowRequests
    from logprobe.records.rows import Column


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
    offsets, given_ids = requests.given_offsets, requests.given_ids
    return replace(
        requests,
        chosen_ids=copy_to(requests.chosen_ids, device),
        num_logprobs=copy_to(requests.num_logprobs, device),
        given_offsets=None if offsets is None else copy_to(offsets, device),
        given_ids=None if given_ids is None else copy_to(given_ids, device),
    )


def allocate(requests: RowRequests, device: torch.device) -> DeviceRows:
    """Allocate tensors on `device`, as `api.allocate` does arrays."""
    num_rows = len(requests.chosen_ids)
    given = None
    if requests.given_ids is not None and requests.given_offsets is not None:
        given = GivenLogprobs(
            offsets=copy_to(requests.given_offsets, device),
            token_ids=copy_to(requests.given_ids, device),
            logprobs=torch.empty(len(requests.given_ids), dtype=torch.float32, device=device),
            ranks=torch.empty(len(requests.given_ids), dtype=torch.int32, device=device),
        )
    return DeviceRows(
        token_ids=torch.empty((num_rows, requests.width), dtype=torch.int32, device=device),
        logprobs=torch.empty((num_rows, requests.width), dtype=torch.float32, device=device),
        ranks=torch.empty(num_rows, dtype=torch.int32, device=device),
        lse=torch.empty(num_rows, dtype=torch.float32, device=device),
        num_logprobs=copy_to(requests.num_logprobs, device),
        is_valid=torch.empty(num_rows, dtype=torch.bool, device=device),
        extras={
            name: torch.full((num_rows,), torch.nan, dtype=torch.float32, device=device)
            for name in requests.extras
        },
        given=given,
    )


def on_host(requests: RowRequests) -> RowRequests:
    """Return the same requests with NumPy arrays."""
    offsets, given_ids = requests.given_offsets, requests.given_ids
    return replace(
        requests,
        chosen_ids=host_array(requests.chosen_ids),
        num_logprobs=host_array(requests.num_logprobs),
        given_offsets=None if offsets is None else host_array(offsets),
        given_ids=None if given_ids is None else host_array(given_ids),
    )


def copy(source: DeviceRows, rows: DeviceRows) -> None:
    """Copy what a kernel writes from arrays to tensors on a device."""
    target: Any = rows
    for name in ("token_ids", "logprobs", "ranks", "lse", "is_valid"):
        getattr(target, name).copy_(torch.from_numpy(getattr(source, name)))
    for name, column in source.extras.items():
        target.extras[name].copy_(torch.from_numpy(column))
    if source.given is not None and target.given is not None:
        own = slice(int(source.given.offsets[0]), int(source.given.offsets[-1]))  # of these rows only
        target.given.logprobs[own].copy_(torch.from_numpy(source.given.logprobs[own]))
        target.given.ranks[own].copy_(torch.from_numpy(source.given.ranks[own]))
