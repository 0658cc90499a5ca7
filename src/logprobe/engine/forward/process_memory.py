"""Memory of this process: lazily mapped pages, garbage collection, and return of freed memory."""

from __future__ import annotations

import atexit
import ctypes
import gc
import math
import mmap
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from logprobe.kernels.arrays import Array

ALIGNMENT: Final = 64  # bytes of a cache line
MAX_ARRAYS: Final = 1 << 12  # arrays that one `PagedMemory` can align within its size
M_TRIM_THRESHOLD: Final = -1  # parameter numbers of mallopt
M_MMAP_THRESHOLD: Final = -3
MAX_MMAP_THRESHOLD: Final = 32 << 20  # glibc's maximum; its trim threshold is at most twice as large
TRIMMING_BYTES: Final = 96 << 10  # large enough for `free` to trim its arena, too small for malloc to map
_thresholds_lock: Final = threading.Lock()
_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes; None on systems that do not report it."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return None


def keep_out_of_collections() -> None:
    """Exclude all existing objects (about a million, mostly from libraries) from garbage collection.

    A full collection would stop the interpreter, and with it the caller's event loop, for about 200 ms. The
    excluded objects are still freed by reference counting; reference cycles stay until
    `put_back_into_collections` or `give_back_memory`.
    """
    gc.collect(1)  # young objects only: a load that left many cycles has run a full collection itself
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # else libraries built with nanobind report leaks at exit


def put_back_into_collections() -> None:
    """Let the garbage collector free excluded objects again, in a later collection."""
    gc.unfreeze()


def give_back_memory() -> None:
    """Free all reference cycles, even those excluded from collection; return the memory to the system."""
    gc.unfreeze()  # do not freeze again: references to a closed model may become cycles a moment later
    give_back_later_memory()


def give_back_later_memory() -> None:
    """Free reference cycles that are not excluded from collection; return the memory to the system."""
    gc.collect()
    return_freed()


def return_freed() -> None:
    """Return freed memory to the system; without this, glibc keeps much of it because of fragmentation."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def return_freed_of_thread() -> None:
    """Return freed memory to the system, including the end of the calling thread's malloc arena.

    `malloc_trim` trims the end of the main arena only. In other arenas, `free` trims the end if that exceeds
    the trim threshold, which glibc raises up to 64 MB; so the threshold is set to 0 for one call of `free`.
    Setting it ends glibc's dynamic adjustment of the trim and mmap thresholds, so both are then set to the
    maximum of that adjustment. If environment variables configure malloc, only `malloc_trim` is called.
    """
    return_freed()
    libc = ctypes.CDLL(None)
    is_set = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if is_set or sys.platform != "linux" or not hasattr(libc, "malloc_trim"):
        return
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    with _thresholds_lock:
        libc.mallopt(M_TRIM_THRESHOLD, 0)
        libc.free(libc.malloc(TRIMMING_BYTES))
        libc.mallopt(M_TRIM_THRESHOLD, 2 * MAX_MMAP_THRESHOLD)
        libc.mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)


class PagedMemory:
    """Zeroed main memory that is handed out as arrays; the system maps each page at its first use."""

    def __init__(self, num_bytes: int, *, are_huge: bool = False) -> None:
        """Reserve the address range.

        Args:
            num_bytes: total size of all arrays.
            are_huge: use huge pages if the system supports them. They are faster to read sequentially, but
                one used byte maps a whole page.

        Raises:
            OSError: the system cannot map that much.
        """
        size = num_bytes + ALIGNMENT * MAX_ARRAYS
        # Private if the system supports it, so that a forked process does not share the slots.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
        self._map = mmap.mmap(-1, size, **flags)
        with suppress(OSError):  # a system without huge pages
            self._advise("MADV_HUGEPAGE" if are_huge else "MADV_NOHUGEPAGE")
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._start = 0

    def has_room(self, num_bytes: int) -> bool:
        """Return True if an array of `num_bytes` bytes can still be taken."""
        return self._start + num_bytes <= len(self._bytes)

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a zeroed array of this shape and dtype, aligned to a cache line."""
        end = self._start + math.prod(shape) * np.dtype(dtype).itemsize
        array = self._bytes[self._start : end].view(dtype).reshape(shape)
        self._start = end + -end % ALIGNMENT
        return array

    def release(self) -> None:
        """Return all pages to the system; arrays that are still in use then read zeros."""
        self._advise("MADV_DONTNEED")

    def _advise(self, name: str) -> None:
        advice = getattr(mmap, name, None)
        if advice is not None:
            self._map.madvise(advice)
