"""Attention of a prompt chunk over the key/value pool, read in place (CPU).

The lanes of vectors are query rows. Each item is some panels of rows of one key head, and goes through its
context a block of keys at a time: the block's scores stand as (keys, rows), which is at once the panel that
the product with its values takes. What earlier blocks gave is scaled down where a greater score comes
(FlashAttention, Dao et al., 2022), so that no scores of a whole context are ever kept. Blocks lie at
multiples of BLOCK_KEYS from a context's begin: a row's bits depend on its own context alone, not on the
chunk that it came in, and are those of the kernel for rows. torch's own fused attention does its products by
another library, which is slower on some processors (docs/decisions.md).
Before it: the attention plan of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.kernels.attention.api import attention_args
from logprobe.kernels.layers.layout import PANEL
from logprobe.kernels.stages import Stage, items_for_threads

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.attention.api import ScoreRule

MAX_PANELS = 4  # of query rows that share a block of keys, which is brought into form for them


def attend_chunk(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, rule: ScoreRule, out: Tensor
) -> None:
    """Write each query row's attention over the context that ends with its own position.

    Args:
        query: (num_rows, heads, key_dim) float32, the last num_rows positions of the context.
        keys: (num_slots, kv_heads, key_dim) float32, one layer's pool.
        values: (num_slots, kv_heads, value_dim) float32, likewise.
        slots: (context,) int64, of the pool; the oldest first.
        rule: how scores are made.
        out: (num_rows, heads, value_dim) float32. The last dimension is contiguous here and in the pool.
    """
    query = query if query.stride(2) == 1 else query.contiguous()
    num_rows, num_heads, _ = query.shape
    num_kv_heads = keys.shape[1]
    groups = num_heads // num_kv_heads
    lanes = _item_lanes(num_rows * groups, num_kv_heads)
    num_blocks = -(-num_rows * groups // lanes)
    Stage(
        "attend_chunk",
        "AttentionArgs",
        num_items=num_blocks * num_kv_heads,
        **attention_args(query, keys, values, out, rule),
        chunk_slots=slots,
        num_rows=num_rows,
        context=len(slots),
        num_blocks=num_blocks,
        item_lanes=lanes,
    ).run()


def _item_lanes(num_lanes: int, num_heads: int) -> int:
    """Of whole panels: as many as share a block well, but few enough that every thread has some."""
    num_panels = num_heads * -(-num_lanes // PANEL)
    return PANEL * max(1, min(MAX_PANELS, num_panels // items_for_threads()))
