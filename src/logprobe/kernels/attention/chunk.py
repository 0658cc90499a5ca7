"""Attention of a prompt chunk over the KV cache, read in place (CPU).

Each vector lane is one query row, and each work item is a few panels of rows for one KV head. An item
processes the context one block of keys at a time. The scores of a block are laid out as (keys, rows), which
is the panel layout that the product with the values needs. Earlier results are rescaled when a larger score
appears (FlashAttention, Dao et al., 2022), so the scores of a whole context are never stored. Blocks start at
multiples of BLOCK_KEYS from the start of the context, so a row's bits depend only on the row's own context,
not on the chunk, and equal those of the row kernel. torch's fused attention is not used, because the library
that it uses for products is slower on some processors (docs/dev/kernels.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.kernels.arrays import as_array
from logprobe.kernels.attention.api import attention_args
from logprobe.kernels.layers.layout import PANEL
from logprobe.kernels.stages import Stage, items_for_threads

if TYPE_CHECKING:
    from logprobe.kernels.arrays import Array
    from logprobe.kernels.attention.api import ScoreRule

MAX_PANELS = 4  # panels of query rows that share one repacked block of keys


def attend_chunk(query: Array, keys: Array, values: Array, slots: Array, rule: ScoreRule, out: Array) -> None:
    """Write the attention output of each query row, over the context up to the row's own position, to `out`.

    Args:
        query: (num_rows, heads, key_dim) float32, for the last num_rows positions of the context.
        keys: (num_slots, kv_heads, key_dim) float32, one layer's cache, last dimension contiguous.
        values: (num_slots, kv_heads, value_dim) float32, one layer's cache, last dimension contiguous.
        slots: (context,) int64, slots of the context, in order of position.
        rule: how scores are computed.
        out: (num_rows, heads, value_dim) float32, last dimension contiguous.
    """
    query = as_array(query)
    if query.strides[2] != query.itemsize:
        query = np.ascontiguousarray(query)
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
    """Return the number of query lanes per work item: MAX_PANELS panels, or fewer to keep threads busy."""
    num_panels = num_heads * -(-num_lanes // PANEL)
    return PANEL * max(1, min(MAX_PANELS, num_panels // items_for_threads()))
