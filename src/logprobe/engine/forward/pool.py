"""The pool: keys and values of every slot, in main memory that is taken from the system at once.

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
from typing import TYPE_CHECKING

import torch

from logprobe.kernels.layers.store import store_rows

if TYPE_CHECKING:
    from collections.abc import Callable

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


def is_plain_float(tensor: torch.Tensor) -> bool:
    """Whether the compiled CPU kernels can read a tensor."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


class KVPool:
    """Keys and values of every slot, (num_slots, kv_heads, dim) a layer, made when a layer first stores."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def layer(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, for tokens of the shape (kv_heads, dim) of these."""
        if layer not in self.keys:
            self._make(layer, key, value)
        return self.keys[layer], self.values[layer]

    def store(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the keys and values, (num_tokens, kv_heads, dim) each, of one layer to `slots`."""
        keys, values = self.layer(layer, key, value)
        if is_plain_float(key):
            store_rows(key, keys, value, values, slots)
        else:
            keys.index_copy_(0, slots, key)
            values.index_copy_(0, slots, value)

    def make_like(self, other: KVPool, new_zeros: Callable[[tuple[int, ...]], torch.Tensor]) -> None:
        """Lay out every layer, shaped as another pool's."""
        for layer, key in other.keys.items():
            self.keys[layer] = new_zeros((self.num_slots, *key.shape[1:]))
            self.values[layer] = new_zeros((self.num_slots, *other.values[layer].shape[1:]))

    def _make(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.keys[layer] = key.new_zeros(self.num_slots, *key.shape[1:])
        self.values[layer] = value.new_zeros(self.num_slots, *value.shape[1:])

    @property
    def is_readable_in_place(self) -> bool:
        """Whether the row kernel can read the pool; not before the pool knows what it stores."""
        return bool(self.keys) and all(map(is_plain_float, self.keys.values()))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token takes in all layers."""
        tensors = [*self.keys.values(), *self.values.values()]
        return sum(tensor.nbytes for tensor in tensors) // self.num_slots
