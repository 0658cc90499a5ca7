"""Rotary position embedding of queries and keys, and the store of keys and values, in one pass (CPU).

Before it: a layer's projections. After it: attention over the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logprobe.kernels.stages import Stage, block_rows

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 16  # of an item
ROWS_FOR_THREADS = 64  # below, starting the threads costs more than they save


@dataclass(frozen=True, slots=True)
class Projections:
    """What one layer's packed tokens were projected to, float32; each head's numbers are contiguous."""

    query: Tensor  # (num_tokens, heads, key_dim)
    key: Tensor  # (num_tokens, kv_heads, key_dim)
    value: Tensor  # (num_tokens, kv_heads, value_dim)


def rotate_and_store(
    projections: Projections,
    cosines: Tensor,
    sines: Tensor,
    pool: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """Rotate queries and keys by their positions (Su et al. 2021, halves as in Llama), and store the latter.

    Args:
        projections: the layer's queries, keys and values.
        cosines: (num_tokens, rotary_dim) float32, the second half a copy of the first; `sines` likewise. So
            much of each head rotates, its first numbers, and the others stay: from nothing to all of them.
        sines: see `cosines`.
        pool: keys (num_slots, kv_heads, key_dim) and values (num_slots, kv_heads, value_dim), float32; row
            `slots[i]` of them is written.
        slots: (num_tokens,) int64, each once.

    Returns:
        The rotated queries, (num_tokens, heads, key_dim) float32.
    """
    out = projections.query.new_empty(projections.query.shape)
    rotary = (cosines.contiguous(), sines.contiguous())
    rotary_stage(projections, rotary, pool, slots, out).run()
    return out


def rotary_stage(
    projections: Projections,
    rotary: tuple[Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    slots: Tensor,
    out: Tensor,
    *,
    is_paired: bool = False,
    query_scales: Tensor | None = None,
) -> Stage:
    """`rotate_and_store` with contiguous cosines and sines, queries into `out`, ready to run.

    Args:
        projections: see `rotate_and_store`, as for all that is not told here.
        rotary: cosines and sines.
        pool: keys and values.
        slots: where they are written to.
        out: (num_tokens, heads, key_dim) float32, contiguous.
        is_paired: neighbours (0, 1), (2, 3), ... rotate together, as in GPT-J. Pair i takes column i of the
            cosines and sines, which come in halves as ever.
        query_scales: (num_tokens,) float32, what the rotated queries are multiplied by.
    """
    query, key, value = projections.query, projections.key, projections.value
    (cosines, sines), (keys, values) = rotary, pool
    num_rows, heads, key_dim = out.shape
    block = block_rows(num_rows, MAX_ROWS)
    return Stage(
        "rotary",
        "RotaryArgs",
        num_items=-(-num_rows // block),
        is_small=num_rows < ROWS_FOR_THREADS,
        query=query,
        key=key,
        value=value,
        cosines=cosines,
        sines=sines,
        query_scales=query_scales,
        out=out,
        key_pool=keys,
        value_pool=values,
        slots=slots,
        num_rows=num_rows,
        heads=heads,
        kv_heads=keys.shape[1],
        key_dim=key_dim,
        value_dim=values.shape[2],
        rotary_dim=cosines.shape[1],
        is_paired=is_paired,
        block_rows=block,
    )
