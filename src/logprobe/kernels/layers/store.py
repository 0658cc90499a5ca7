"""Stores a layer's keys and values in their KV cache slots, in one kernel (CPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.kernels.stages import Stage, block_rows

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 64  # maximum rows per work item


def store_rows(key: Tensor, key_pool: Tensor, value: Tensor, value_pool: Tensor, slots: Tensor) -> None:
    """Copy row i of `key` and `value` to row `slots[i]` of `key_pool` and `value_pool`.

    Args:
        key: (num_tokens, kv_heads, key_dim) float32.
        key_pool: (num_slots, kv_heads, key_dim) float32, contiguous.
        value: (num_tokens, kv_heads, value_dim) float32.
        value_pool: (num_slots, kv_heads, value_dim) float32, contiguous.
        slots: (num_tokens,) int64, distinct.
    """
    key, value = key.contiguous(), value.contiguous()
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
        key_width=key.shape[1:].numel(),
        value_width=value.shape[1:].numel(),
        num_rows=len(slots),
        block_rows=block,
    ).run()
