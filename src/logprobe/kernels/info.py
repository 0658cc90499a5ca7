"""Which kernel serves which device; the warm-up that compiles the CPU kernels before any request."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec

from logprobe.kernels.compiling import BASE, compiled_beside
from logprobe.kernels.threads.parallel import worker_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What `warm_up` did."""

    seconds: float
    is_from_cache: bool  # False where any kernel had to be compiled


def kernel_of(device_type: str) -> str:
    """'numba', 'triton' or 'torch': what extracts on a device of that type."""
    if device_type == "cpu":
        return "numba"
    return "triton" if device_type == "cuda" and find_spec("triton") is not None else "torch"


def kernel_info() -> dict[str, str]:
    """Device type to the kernel that serves it."""
    return {device_type: kernel_of(device_type) for device_type in ("cpu", "cuda")}


def warm_up() -> WarmUp:
    """Compile the CPU kernels, or link what lies on the disk, so that no request waits for a compiler."""
    started = time.perf_counter()
    with compiled_beside(BASE) as missing:
        pass
    workers = [worker_of(name)() for name in BASE]
    is_from_cache = not missing and all(worker.is_from_cache for worker in workers)
    return WarmUp(seconds=time.perf_counter() - started, is_from_cache=is_from_cache)
