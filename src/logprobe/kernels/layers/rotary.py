"""Rotary embedding of queries and keys, and storing keys and values in the KV cache, in one kernel (CPU)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from logprobe.kernels.arrays import as_array
from logprobe.kernels.stages import Stage, block_rows

if TYPE_CHECKING:
    from logprobe.kernels.arrays import Array

MAX_ROWS = 16  # maximum rows per work item
ROWS_FOR_THREADS = 64  # with fewer rows, one thread is faster than several


@dataclass(frozen=True, slots=True)
class Projections:
    """Queries, keys and values of a step's packed tokens in one layer, float32; each head is contiguous."""

    query: Array  # (num_tokens, heads, key_dim)
    key: Array  # (num_tokens, kv_heads, key_dim)
    value: Array  # (num_tokens, kv_heads, value_dim)


def rotate_and_store(
    projections: Projections,
    cosines: Array,
    sines: Array,
    pool: tuple[Array, Array],
    slots: Array,
) -> Array:
    """Rotate queries and keys by their positions (Su et al. 2021), and store keys and values in the cache.

    As in Llama, dimension i of the first half of the rotated dimensions and dimension i of the second half
    form a pair.

    Args:
        projections: the layer's queries, keys and values.
        cosines: (num_tokens, rotary_dim) float32; the second half of each row repeats the first. The first
            rotary_dim dimensions of each head are rotated, 0 <= rotary_dim <= key_dim.
        sines: (num_tokens, rotary_dim) float32, laid out like `cosines`.
        pool: the cache: keys (num_slots, kv_heads, key_dim) and values (num_slots, kv_heads, value_dim),
            float32; token i is written to row `slots[i]`.
        slots: (num_tokens,) int64, distinct.

    Returns:
        The rotated queries, (num_tokens, heads, key_dim) float32.
    """
    out = np.empty(projections.query.shape, np.float32)
    rotary = (np.ascontiguousarray(as_array(cosines)), np.ascontiguousarray(as_array(sines)))
    rotary_stage(projections, rotary, pool, slots, out).run()
    return out


def rotary_stage(
    projections: Projections,
    rotary: tuple[Array, Array],
    pool: tuple[Array, Array],
    slots: Array,
    out: Array,
    *,
    is_paired: bool = False,
    query_scales: Array | None = None,
) -> Stage:
    """Return a stage that computes `rotate_and_store` and writes the rotated queries to `out`.

    Args:
        projections: see `rotate_and_store`.
        rotary: cosines and sines, contiguous; see `rotate_and_store`.
        pool: keys and values; see `rotate_and_store`.
        slots: see `rotate_and_store`.
        out: (num_tokens, heads, key_dim) float32, contiguous.
        is_paired: rotate adjacent pairs (0, 1), (2, 3), ... as in GPT-J. Pair i uses column i of the cosines
            and sines, whose layout does not change.
        query_scales: (num_tokens,) float32, by which the rotated queries are multiplied; None: not at all.
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
