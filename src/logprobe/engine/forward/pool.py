"""Main memory for the slots, taken from the system at once.

The system hands memory over page by page, when a page is first written. In the middle of a request that
would be a surprise, so that all pages are asked for at load, in one call that is faster than writing them.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import sys

import torch

ALIGNMENT = 64  # bytes of a cache line
MOST_TENSORS = 1 << 12  # that are aligned without the sum of their bytes outgrowing the memory
POPULATE_WRITE = 23  # madvise's MADV_POPULATE_WRITE (Linux 5.14)

logger = logging.getLogger("logprobe")


class SlotMemory:
    """Zeroed bytes of the CPU, given out as tensors."""

    def __init__(self, num_bytes: int) -> None:
        """Take the bytes.

        Raises:
            OSError: the system has no room for them.
        """
        size = num_bytes + ALIGNMENT * MOST_TENSORS
        # Private where the system knows the word: a process that forks must not share its slots.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
        self._bytes = torch.frombuffer(mmap.mmap(-1, size, **flags), dtype=torch.uint8)
        self._start = 0
        if sys.platform.startswith("linux"):
            self._populate()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros."""
        end = self._start + math.prod(shape) * dtype.itemsize
        tensor = self._bytes[self._start : end].view(dtype).view(shape)
        self._start = end + -end % ALIGNMENT
        return tensor

    def _populate(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        address, size = ctypes.c_void_p(self._bytes.data_ptr()), ctypes.c_size_t(len(self._bytes))
        if madvise(address, size, POPULATE_WRITE):
            reason = os.strerror(ctypes.get_errno())
            logger.debug("the pool's memory will come when it is first used: %s", reason)
