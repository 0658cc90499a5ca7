"""Writing a step's keys and values to their slots (CPU): plain copies, one kernel for both.

Before it: a layer's packed keys and values. After it: attention over the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.kernels.threads.parallel import block_rows, parallel_for, worker_of

if TYPE_CHECKING:
    from torch import Tensor

worker = worker_of("layers.store")
MOST_ROWS = 64  # of an item


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
    block = block_rows(len(slots), MOST_ROWS)
    context = [
        key.data_ptr(), key_pool.data_ptr(), key[0].numel(),
        value.data_ptr(), value_pool.data_ptr(), value[0].numel(),
        slots.data_ptr(), len(slots), block,
    ]  # fmt: skip
    parallel_for(worker(), context, -(-len(slots) // block))
