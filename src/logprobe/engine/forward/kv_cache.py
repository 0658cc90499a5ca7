"""The KV cache: keys and values of every slot, by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.info import native_library

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from logprobe.kernels.arrays import Array


def is_for_kernels(values: Array | torch.Tensor) -> bool:
    """Return True if the native kernels can read an array or tensor (float32 on a CPU)."""
    if isinstance(values, np.ndarray):
        is_float = values.dtype == np.float32
    else:
        is_float = values.device.type == "cpu" and str(values.dtype) == "torch.float32"
    return is_float and native_library() is not None


class KVPool:
    """The KV cache: keys and values of every slot, (num_slots, kv_heads, dim) per layer.

    These are arrays for the native decoder on a CPU, and tensors for other decoders. On a CPU, the engine
    allocates the cache without huge pages, so that only slots that have been used take up memory
    (docs/dev/decisions.md).
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.keys: dict[int, Any] = {}
        self.values: dict[int, Any] = {}
        # True if the row kernel can read the cache; False until the shapes are known.
        self.is_readable_in_place = False

    def layer(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cached keys and values of one layer, (num_slots, kv_heads, dim) each.

        If the layer is new, they are allocated first, with the shapes of the tokens in `key` and `value`.
        """
        if layer not in self.keys:
            shapes = {layer: (tuple(key.shape[1:]), tuple(value.shape[1:]))}
            self.lay_out(shapes, key.new_zeros)
        return self.keys[layer], self.values[layer]

    def store(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write one layer's keys and values, (num_tokens, kv_heads, dim), to (num_tokens,) int64 slots."""
        keys, values = self.layer(layer, key, value)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def lay_out(
        self,
        shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]],
        new_zeros: Callable[[tuple[int, ...]], Array | torch.Tensor],
    ) -> None:
        """Allocate keys and values for layers.

        Args:
            shapes: layer → shapes of one token's key and value.
            new_zeros: called with a shape; returns a zeroed array or tensor of that shape.
        """
        for layer, (key, value) in shapes.items():
            self.keys[layer] = new_zeros((self.num_slots, *key))
            self.values[layer] = new_zeros((self.num_slots, *value))
        self.is_readable_in_place = bool(self.keys) and all(map(is_for_kernels, self.keys.values()))

    @property
    def shapes(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes of one token's key and value, by layer."""
        return {
            layer: (tuple(key.shape[1:]), tuple(self.values[layer].shape[1:]))
            for layer, key in self.keys.items()
        }
