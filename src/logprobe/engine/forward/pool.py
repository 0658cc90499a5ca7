"""The pool: keys and values of every slot, in main memory whose pages come as slots are first used.

A slot's rows lie in pages of 4 KiB, so that even the first step on new slots waits for few of them
(docs/decisions.md has the worst step); what is never used is never taken from the system.
"""

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
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

import torch

from logprobe.errors import ModelError
from logprobe.kernels.info import native_library
from logprobe.kernels.layers.store import store_rows
from logprobe.models.cache import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ALIGNMENT = 64  # bytes of a cache line
MAX_TENSORS = 1 << 12  # that are aligned without the sum of their bytes outgrowing the memory
DEFAULT_SHARE: Final = 4  # all pools of a machine are at most a quarter of what the weights leave
MAX_DEFAULT_BYTES: Final = 1 << 30
MIN_DEFAULT_BYTES: Final = 1 << 26
UNKNOWN_FREE_BYTES: Final = 1 << 31  # where the system does not say
BASE_BYTES: Final = 500_000_000  # of the libraries, a step's scratch and the least pool
M_TRIM_THRESHOLD: Final = -1  # of mallopt
M_MMAP_THRESHOLD: Final = -3
MAX_MMAP_THRESHOLD: Final = 32 << 20  # to which glibc raises it; the other one to twice as much
TRIMMING_BYTES: Final = 96 << 10
"""For which `free` looks at the end of its arena, and for which malloc makes no mapping."""
_thresholds_lock: Final = threading.Lock()
_MEMINFO: Final = Path("/proc/meminfo")
_STATM: Final = Path("/proc/self/statm")
_MAPS: Final = Path("/proc/self/maps")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def default_kv_bytes(num_pools: int = 1) -> int:
    """The size of each pool that nobody gave one, of so many on this machine, once the weights are mapped."""
    share = free_bytes() // (DEFAULT_SHARE * num_pools)
    return min(MAX_DEFAULT_BYTES, max(share, MIN_DEFAULT_BYTES))


def free_bytes() -> int:
    """Memory that this process could take and drive nothing out: the machine's, or its container's.

    The system counts pages of files as free, read or not yet. Those that this process maps are its weights,
    which each step reads, so they are not.
    """
    free = _meminfo().get("MemAvailable")
    if free is None:
        return UNKNOWN_FREE_BYTES
    for cgroup, limit in _limited_cgroups():
        free = min(free, limit - _held_bytes(cgroup))
    return max(free - _mapped_bytes(), 0)


def check_memory(name: str, num_bytes: int) -> None:
    """Refuse a model whose weights, of so many bytes, can never be in memory here, before they are read.

    Raises:
        ModelError: the machine, or its container, has less memory in all.
    """
    total = _meminfo().get("MemTotal")
    if total is None:
        return
    limit = min((limit for _, limit in _limited_cgroups()), default=total)
    where = "this container" if limit < total else "this machine"
    needed, total = num_bytes + BASE_BYTES, min(total, limit)
    if needed > total:
        raise ModelError(
            f"{name}: needs {in_words(needed)} of memory for its weights and a pool of keys and values, and "
            f"{where} has {in_words(total)}; use a smaller model, the same with weights of fewer bits, or "
            "more memory"
        )


def _meminfo() -> dict[str, int]:
    """The machine's memory by the kernel's names, bytes; nothing where the system does not say."""
    try:
        lines = [line.split() for line in _MEMINFO.read_text(encoding="ascii").splitlines()]
        return {name.rstrip(":"): int(size) << 10 for name, size, *_ in lines}
    except (OSError, ValueError):
        return {}


def _limited_cgroups() -> Iterator[tuple[Path, int]]:
    """The control groups (version 2) around this process that have a limit, and that, bytes."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    # A container may see its own group as the root, whatever its name outside.
    for name in (PurePosixPath(own), *PurePosixPath(own).parents):
        with suppress(OSError, ValueError):  # none of that name, or one without a limit ("max")
            yield _CGROUPS / name, int((_CGROUPS / name / "memory.max").read_text())


def _held_bytes(cgroup: Path) -> int:
    """Memory of a control group that nothing but its end frees: without the pages of files."""
    try:
        held = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return held - int(stat["active_file"]) - int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _mapped_bytes() -> int:
    """Bytes of the files that this process maps to read them, each part once."""
    try:
        lines = [line.split(maxsplit=5) for line in _MAPS.read_text().splitlines()]
    except OSError:
        return 0
    sizes: dict[tuple[str, ...], int] = {}
    for addresses, access, *place, _ in (line for line in lines if len(line) > 5):
        if access == "r--s":
            begin, end = (int(part, 16) for part in addresses.split("-"))
            sizes[*place] = max(end - begin, sizes.get((*place,), 0))
    return sum(sizes.values())


def resident_bytes() -> int | None:
    """Main memory that this process takes now; None where the system does not say."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return None


def keep_out_of_collections() -> None:
    """Let the garbage collector walk no more through what is there now, a million objects of the libraries.

    A full collection would stop the interpreter, and the caller's event loop with it, for some 200 ms. What
    is there now is still freed when nothing refers to it; a cycle of it stays until `give_back_memory`.
    """
    gc.collect(1)  # what came lately: a load that left more has had all collected, which takes much longer
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # nanobind's libraries tell of leaks at exit where it is not undone


def give_back_memory() -> None:
    """Free what only collections free, and return it to the system."""
    gc.unfreeze()  # for good: what a closed model is still referred to by may be a cycle a moment later
    give_back_later_memory()


def give_back_later_memory() -> None:
    """`give_back_memory` of what came since the start: nothing that was there then is walked through."""
    gc.collect()
    return_freed()


def return_freed() -> None:
    """Return to the system what was freed; glibc keeps much of it else, as holes of many sizes."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def return_freed_of_thread() -> None:
    """Return freed memory to the system, including the end of the calling thread's malloc arena.

    `malloc_trim` trims the end of the main arena only. Of another arena, `free` trims it beyond a threshold,
    which glibc raises up to 64 MB: set it to 0 for one call of `free`. Setting it fixes both thresholds that
    glibc else adapts, so they are left where it raises them to, unless the environment sets them.
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
    """Zeroed bytes of the CPU, given out as tensors."""

    def __init__(self, num_bytes: int, *, are_huge: bool = False) -> None:
        """Ask for the bytes; each page comes when it is first touched.

        Args:
            num_bytes: of all tensors together.
            are_huge: whether the pages are huge ones where the system has them: quicker to go through, but
                a byte takes all of one.

        Raises:
            OSError: the system has no room for them.
        """
        size = num_bytes + ALIGNMENT * MAX_TENSORS
        # Private where the system knows the word: a process that forks must not share its slots.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
        self._map = mmap.mmap(-1, size, **flags)
        with suppress(OSError):  # a system that has none
            self._advise("MADV_HUGEPAGE" if are_huge else "MADV_NOHUGEPAGE")
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether a tensor of so many bytes can still be taken."""
        return self._start + num_bytes <= len(self._bytes)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros."""
        end = self._start + math.prod(shape) * dtype.itemsize
        tensor = self._bytes[self._start : end].view(dtype).view(shape)
        self._start = end + -end % ALIGNMENT
        return tensor

    def release(self) -> None:
        """Give all pages back to the system, whoever still holds a tensor; it then reads zeros."""
        self._advise("MADV_DONTNEED")

    def _advise(self, name: str) -> None:
        advice = getattr(mmap, name, None)
        if advice is not None:
            self._map.madvise(advice)


def is_for_kernels(tensor: torch.Tensor) -> bool:
    """Return True if the native kernels read this tensor."""
    is_float = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return is_float and native_library() is not None


class KVPool:
    """Keys and values of every slot, (num_slots, kv_heads, dim) a layer, made when a layer first stores."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        # Whether the row kernel can read the pool; not before the pool knows what it stores.
        self.is_readable_in_place = False

    def layer(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, for tokens of the shape (kv_heads, dim) of these."""
        if layer not in self.keys:
            self._make(layer, key, value)
        return self.keys[layer], self.values[layer]

    def store(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the keys and values, (num_tokens, kv_heads, dim) each, of one layer to `slots`."""
        keys, values = self.layer(layer, key, value)
        if is_for_kernels(key):
            store_rows(key, keys, value, values, slots)
        else:
            keys.index_copy_(0, slots, key)
            values.index_copy_(0, slots, value)

    def lay_out(
        self,
        shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]],
        new_zeros: Callable[[tuple[int, ...]], torch.Tensor],
    ) -> None:
        """Make every layer, of the shapes that a token's keys and values have there."""
        for layer, (key, value) in shapes.items():
            self.keys[layer] = new_zeros((self.num_slots, *key))
            self.values[layer] = new_zeros((self.num_slots, *value))
        self.is_readable_in_place = bool(self.keys) and all(map(is_for_kernels, self.keys.values()))

    def _make(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.keys[layer] = key.new_zeros(self.num_slots, *key.shape[1:])
        self.values[layer] = value.new_zeros(self.num_slots, *value.shape[1:])
        self.is_readable_in_place = all(map(is_for_kernels, self.keys.values()))

    @property
    def shapes(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """What a token's keys and values are in each layer."""
        return {
            layer: (tuple(key.shape[1:]), tuple(self.values[layer].shape[1:]))
            for layer, key in self.keys.items()
        }
