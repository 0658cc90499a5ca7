"""Rotary position embedding of queries and keys, and the store of keys and values, in one pass (CPU).

Before it: a layer's projections. After it: attention over the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba import njit

from logprobe.kernels.threads.intrinsics import FLOAT
from logprobe.kernels.threads.parallel import Stage, compiled_worker, float32_at, int64_at, next_item

if TYPE_CHECKING:
    from torch import Tensor

# What a task's numbers mean, after the two of `parallel_for`: addresses, strides in float32, sizes.
(QUERY, QUERY_STRIDE, KEY, KEY_STRIDE, VALUE, VALUE_STRIDE, COSINES, SINES) = range(2, 10)
(OUT, KEY_POOL, VALUE_POOL, SLOTS, NUM_ROWS, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM) = range(10, 19)
BLOCK_ROWS = 16
ROWS_FOR_THREADS = 64  # below, starting the threads costs more than they save


@dataclass(frozen=True, slots=True)
class Projections:
    """What one layer's packed tokens were projected to, float32; each row is contiguous."""

    query: Tensor  # (num_tokens, heads · key_dim)
    key: Tensor  # (num_tokens, kv_heads · key_dim)
    value: Tensor  # (num_tokens, kv_heads · value_dim)


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
        cosines: (num_tokens, key_dim) float32, the second half a copy of the first; `sines` likewise.
        sines: see `cosines`.
        pool: keys (num_slots, kv_heads, key_dim) and values (num_slots, kv_heads, value_dim), float32; row
            `slots[i]` of them is written.
        slots: (num_tokens,) int64, each once.

    Returns:
        The rotated queries, (num_tokens, heads, key_dim) float32.
    """
    query, num_rows, key_dim = projections.query, len(slots), pool[0].shape[2]
    out = query.new_empty(num_rows, query.shape[1] // key_dim, key_dim)
    rotary = (cosines.contiguous(), sines.contiguous())
    stage = rotary_stage(projections, rotary, pool, slots, out)
    stage.run(num_threads=1 if num_rows < ROWS_FOR_THREADS else None)
    return out


def rotary_stage(
    projections: Projections,
    rotary: tuple[Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    slots: Tensor,
    out: Tensor,
) -> Stage:
    """`rotate_and_store` with contiguous cosines and sines, queries into `out`, ready to run."""
    query, key, value = projections.query, projections.key, projections.value
    (cosines, sines), (keys, values) = rotary, pool
    num_rows, heads, key_dim = out.shape
    context = [
        query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
        cosines.data_ptr(), sines.data_ptr(),
        out.data_ptr(), keys.data_ptr(), values.data_ptr(), slots.data_ptr(),
        num_rows, heads, keys.shape[1], key_dim, values.shape[2],
    ]  # fmt: skip
    blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    return Stage(worker(), context, blocks, (projections, rotary, pool, slots, out))


@njit
def _rotate(source: Any, target: Any, cosines: Any, sines: Any) -> None:
    half = target.size // 2
    for i in range(half):
        target[i] = source[i] * cosines[i] - source[half + i] * sines[i]
    for i in range(half):
        target[half + i] = source[half + i] * cosines[half + i] + source[i] * sines[half + i]


@njit
def _rotate_heads(source: Any, target: Any, num_heads: Any, cosines: Any, sines: Any) -> None:
    dim = cosines.size
    for head in range(num_heads):
        place = FLOAT * dim * head
        _rotate(float32_at(source + place, dim), float32_at(target + place, dim), cosines, sines)


@njit
def _place_row(task: Any, row: Any, slot: Any) -> None:
    dim = task[KEY_DIM]
    cosines = float32_at(task[COSINES] + FLOAT * dim * row, dim)
    sines = float32_at(task[SINES] + FLOAT * dim * row, dim)
    query, out = task[QUERY] + FLOAT * task[QUERY_STRIDE] * row, task[OUT] + FLOAT * task[HEADS] * dim * row
    _rotate_heads(query, out, task[HEADS], cosines, sines)
    key, stored = task[KEY] + FLOAT * task[KEY_STRIDE] * row, FLOAT * task[KV_HEADS] * dim * slot
    _rotate_heads(key, task[KEY_POOL] + stored, task[KV_HEADS], cosines, sines)
    width = task[KV_HEADS] * task[VALUE_DIM]
    value = float32_at(task[VALUE] + FLOAT * task[VALUE_STRIDE] * row, width)
    target = float32_at(task[VALUE_POOL] + FLOAT * width * slot, width)
    for i in range(width):
        target[i] = value[i]


@compiled_worker()
def worker(task: Any) -> None:
    """Blocks of BLOCK_ROWS rows."""
    num_rows = task[NUM_ROWS]
    slots = int64_at(task[SLOTS], num_rows)
    item = next_item(task)
    while item >= 0:
        for row in range(item * BLOCK_ROWS, min(num_rows, (item + 1) * BLOCK_ROWS)):
            _place_row(task, row, slots[row])
        item = next_item(task)
