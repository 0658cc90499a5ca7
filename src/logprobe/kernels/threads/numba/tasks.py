"""What a worker reads of its task: the next item, and arrays at addresses.

Before it: a task that `threads.parallel` or a series has filled. After it: the compiled loops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from logprobe.kernels.processor import DOUBLE, FLOAT, LINE
from logprobe.kernels.threads.numba.intrinsics import fetch_add, internal, pointer
from logprobe.kernels.threads.parallel import TASK_FIELDS


@internal
def task_at(address: Any) -> Any:
    """The (TASK_FIELDS,) int64 task that a worker was started with."""
    return carray(address, (TASK_FIELDS,), np.int64)


@internal
def next_item(task: Any) -> Any:
    """The next item that no thread has taken, or -1 when all are."""
    item = fetch_add(task.ctypes.data, 1)
    return item if item < task[1] else -1


@internal
def float32_at(address: Any, size: Any) -> Any:
    """`size` float32 at an address, as an array."""
    return carray(pointer(address), (size,), np.float32)


@internal
def float32_on_lines(size: Any) -> Any:
    """Room for float32 that begins with a cache line: no vector of it lies in two."""
    memory = np.empty(size + LINE // FLOAT, np.float32)
    return memory[-memory.ctypes.data % LINE // FLOAT :][:size]


@internal
def float64_on_lines(size: Any) -> Any:
    """Uninitialized float64 array that begins with a cache line."""
    memory = np.empty(size + LINE // DOUBLE, np.float64)
    return memory[-memory.ctypes.data % LINE // DOUBLE :][:size]


@internal
def int32_at(address: Any, size: Any) -> Any:
    """`size` int32 at an address, as an array."""
    return carray(pointer(address), (size,), np.int32)


@internal
def int64_at(address: Any, size: Any) -> Any:
    """`size` int64 at an address, as an array."""
    return carray(pointer(address), (size,), np.int64)


@internal
def uint16_at(address: Any, size: Any) -> Any:
    """`size` uint16 at an address, as an array: also the bits of float16 and bfloat16."""
    return carray(pointer(address), (size,), np.uint16)


@internal
def uint8_at(address: Any, size: Any) -> Any:
    """`size` uint8 at an address, as an array: also booleans."""
    return carray(pointer(address), (size,), np.uint8)
