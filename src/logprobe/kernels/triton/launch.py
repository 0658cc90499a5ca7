"""Programmatic dependent launch: a kernel starts while the kernel before it still runs.

On NVIDIA GPUs since Hopper, a kernel that is launched this way may start as soon as all programs of the
kernel before it have started. It must call `wait_for_inputs` before it reads what an earlier kernel wrote,
and before it writes. Every program of every such kernel must make this call, because later kernels rely on
this: when a kernel has ended, all kernels before it have ended too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
FIRST_CAPABILITY = 9  # Hopper


@functools.cache
def options(device: torch.device) -> dict[str, Any]:
    """Return the launch options that every kernel of the decoder takes on a device."""
    is_early = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= FIRST_CAPABILITY
    return {"is_early": True, "launch_pdl": True} if is_early else {"is_early": False}


@triton.jit
def wait_for_inputs(is_early: tl.constexpr) -> None:
    """Let the next kernel start, and wait until the kernels before this one have ended."""
    if is_early:
        gdc_wait()
        gdc_launch_dependents()
