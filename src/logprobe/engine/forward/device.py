"""The device of a model: which one to use, and how a thread uses it."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

DRIVERS: Final = ("libcuda.so.1", "nvcuda.dll")  # libraries of NVIDIA's driver on Linux and on Windows
AMD_DRIVER: Final = Path("/dev/kfd")


def choose_device(device: str) -> str:
    """Return the device for `EngineConfig.device`: `cpu`, `cuda` or `cuda:N`.

    Imports torch only for a GPU, or for `auto` where the driver of a GPU is installed.

    Raises:
        ParameterError: the GPU does not exist.
    """
    if device == "cpu" or (device == "auto" and not _may_have_gpu()):
        return "cpu"
    if find_spec("torch") is None:
        remedy = "pip install 'logprobe[torch]', or use cpu or auto"
        raise ParameterError("device", f"{device} is not available: it needs torch; {remedy}")
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if has_gpu else "cpu"
    if not has_gpu:
        raise ParameterError("device", f"{device} is not available: torch finds no GPU; use cpu or auto")
    count = torch.cuda.device_count()
    what = f"{device} does not exist: torch finds {count} GPU{'s' if count > 1 else ''}"
    require(_index(device) < count, "device", f"{what}; use an index below {count}")
    return device


def on_device(device: str) -> AbstractContextManager[object]:
    """Make a GPU this thread's current device in a `with` block; do nothing for a CPU.

    Tensor operations run on the GPU of their tensors, but Triton kernels, CUDA graphs and memory queries use
    the current GPU of the thread that starts them, which is the first one by default.
    """
    if not device.startswith("cuda"):
        return nullcontext()
    import torch

    return torch.cuda.device(_index(device))


def _may_have_gpu() -> bool:
    """Return False if torch cannot find a GPU, because torch is not installed or there is no GPU driver."""
    if sys.modules.get("torch") is not None:
        return True
    if find_spec("torch") is None:
        return False
    return AMD_DRIVER.exists() or any(map(_can_be_loaded, DRIVERS))


def _can_be_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)
