"""Main memory for the slots, taken from the system on the side.

The system hands memory over page by page, when a page is first written or asked for ahead. A gigabyte takes
half a second and more: too long to wait for at every start, and a surprise in the middle of a request.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import sys
import threading

import torch

ALIGNMENT = 64  # bytes of a cache line
MOST_TENSORS = 1 << 12  # that are aligned without the sum of their bytes outgrowing the memory
POPULATE_WRITE = 23  # madvise's MADV_POPULATE_WRITE (Linux 5.14): pages come, what is in them stays
STRIDE = 1 << 21  # bytes asked for in one call, which holds up the process's other calls for memory

logger = logging.getLogger("logprobe")


class SlotMemory:
    """Zeroed bytes of the CPU, given out as tensors."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve the bytes.

        Raises:
            OSError: the system has no room for them.
        """
        size = num_bytes + ALIGNMENT * MOST_TENSORS
        # Private where the system knows the word: a process that forks must not share its slots.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
        self._bytes = torch.frombuffer(mmap.mmap(-1, size, **flags), dtype=torch.uint8)
        self._start = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros."""
        end = self._start + math.prod(shape) * dtype.itemsize
        tensor = self._bytes[self._start : end].view(dtype).view(shape)
        self._start = end + -end % ALIGNMENT
        return tensor

    def populate(self) -> threading.Thread:
        """Ask the system for all pages, on a thread of its own; they may be in use already."""
        thread = threading.Thread(target=self._populate, name="logprobe-memory", daemon=True)
        thread.start()
        return thread

    def _populate(self) -> None:
        if not sys.platform.startswith("linux"):
            return
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread, when a core is free
        except OSError as error:  # a sandbox may forbid it; in the way of requests it would do harm
            logger.debug("the pool's memory will come when it is first used: %s", error)
            return
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for start in range(0, len(self._bytes), STRIDE):
            address = ctypes.c_void_p(self._bytes.data_ptr() + start)
            size = ctypes.c_size_t(min(STRIDE, len(self._bytes) - start))
            if madvise(address, size, POPULATE_WRITE):
                reason = os.strerror(ctypes.get_errno())
                logger.debug("the pool's memory will come when it is first used: %s", reason)
                return
