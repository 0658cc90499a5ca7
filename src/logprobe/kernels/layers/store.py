"""Stores a layer's keys and values in their KV cache slots, in one kernel (CPU)."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from logprobe.kernels.arrays import as_array
from logprobe.kernels.stages import Stage, block_rows

if TYPE_CHECKING:
    from logprobe.kernels.arrays import Array

MAX_ROWS = 64  # maximum rows per work item


def store_rows(key: Array, key_pool: Array, value: Array, value_pool: Array, slots: Array) -> None:
    """Copy row i of `key` and `value` to row `slots[i]` of `key_pool` and `value_pool`.

    Args:
        key: (num_tokens, kv_heads, key_dim) float32.
        key_pool: (num_slots, kv_heads, key_dim) float32, contiguous.
        value: (num_tokens, kv_heads, value_dim) float32.
        value_pool: (num_slots, kv_heads, value_dim) float32, contiguous.
        slots: (num_tokens,) int64, distinct.
    """
    key, value = (np.ascontiguousarray(as_array(part)) for part in (key, value))
    block = block_rows(len(slots), MAX_ROWS)
    Stage(
        "store",
        "StoreArgs",
        num_items=-(-len(slots) // block),
        keys=key,
        values=value,
        key_pool=key_pool,
        value_pool=value_pool,
        slots=slots,
        key_width=prod(key.shape[1:]),
        value_width=prod(value.shape[1:]),
        num_rows=len(slots),
        block_rows=block,
    ).run()
