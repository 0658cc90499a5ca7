"""Selects the implementation of the kernels for each type of device: native, Triton or torch."""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from logprobe.kernels.native import library

if TYPE_CHECKING:
    from logprobe.kernels.native import Library

REMEDY: Final = (
    "install a wheel for this system, or reinstall with a C++ compiler on PATH; see docs/dev/kernels.md"
)

logger = logging.getLogger("logprobe")


@functools.cache
def native_library() -> Library | None:
    """Return the native library; None if no variant runs on this machine, which is logged once.

    Raises:
        ParameterError: `LOGPROBE_KERNELS` names a variant that is not built or that cannot run here.
    """
    try:
        return library()
    except OSError as error:
        logger.warning(
            "native kernels are not available (%s); models on the CPU run in PyTorch, which is slow; %s",
            error,
            REMEDY,
        )
        return None


def cpu_arithmetics() -> tuple[str, ...]:
    """Return the arithmetics of matrix products that the native library has on this processor."""
    found = native_library()
    return ("fma",) if found is None or found.variant == "neon" else ("fma", "bf16x3")


def kernel_of(device_type: str) -> str:
    """Return the kernel implementation for a device type: 'native', 'triton' or 'torch'."""
    if device_type == "cpu":
        return "torch" if native_library() is None else "native"
    return "triton" if device_type == "cuda" and find_spec("triton") is not None else "torch"


def kernel_info() -> dict[str, str]:
    """Return the kernel implementation for each device type, by the name of the device type."""
    return {device_type: kernel_of(device_type) for device_type in ("cpu", "cuda")}
