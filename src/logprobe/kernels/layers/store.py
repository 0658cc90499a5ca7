"""Writing a step's keys and values to their slots (CPU): plain copies, one kernel for both.

Before it: a layer's packed keys and values. After it: attention over the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.kernels.stages import Stage, block_rows

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 64  # of an item


def store_rows(key: Tensor, key_pool: Tensor, value: Tensor, value_pool: Tensor, slots: Tensor) -> None:
    """Copy row i of `key` and `value` to row `slots[i]` of their pools.

    Args:
        key: (num_tokens, kv_heads, key_dim) float32; `value` likewise.
        key_pool: (num_slots, kv_heads, key_dim) float32, contiguous.
        value: (num_tokens, kv_heads, value_dim) float32.
        value_pool: (num_slots, kv_heads, value_dim) float32, contiguous.
        slots: (num_tokens,) int64, each once.
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
