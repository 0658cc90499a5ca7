"""The device of a model: which one to use, and how a thread uses it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def choose_device(device: str) -> str:
    """Return the device for `EngineConfig.device`: `cpu`, `cuda` or `cuda:N`.

    Raises:
        ParameterError: the GPU does not exist.
    """
    has_gpu = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if has_gpu else "cpu"
    if device != "cpu":
        if not has_gpu:
            raise ParameterError("device", f"{device} is not available: torch finds no GPU; use cpu or auto")
        count = torch.cuda.device_count()
        what = f"{device} does not exist: torch finds {count} GPU{'s' if count > 1 else ''}"
        require(_index(device) < count, "device", f"{what}; use an index below {count}")
    return device


def on_device(device: str) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread in a `with` block; do nothing for other devices.

    Tensor operations run on the GPU of their tensors, but Triton kernels, CUDA graphs and memory queries use
    the current GPU of the thread that starts them, which is the first one by default.
    """
    return torch.cuda.device(_index(device)) if device.startswith("cuda") else nullcontext()


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)
