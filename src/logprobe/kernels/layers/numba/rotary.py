"""The loops of `layers.rotary`."""

from __future__ import annotations

from typing import Any

from logprobe.kernels.processor import FLOAT
from logprobe.kernels.threads.numba.intrinsics import internal
from logprobe.kernels.threads.numba.tasks import float32_at, int64_at, next_item
from logprobe.kernels.threads.numba.workers import compiled_worker

# What a task's numbers mean, after the two of `parallel_for`: addresses, strides in float32 of a row and of a
# head, sizes.
(QUERY, QUERY_ROW, QUERY_HEAD, KEY, KEY_ROW, KEY_HEAD, VALUE, VALUE_ROW, VALUE_HEAD) = range(2, 11)
(COSINES, SINES, QUERY_SCALES, OUT, KEY_POOL, VALUE_POOL, SLOTS) = range(11, 18)  # 0: no scales
(NUM_ROWS, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, ROTARY_DIM, IS_PAIRED, BLOCK_ROWS) = range(18, 26)


@internal
def _rotate(source: Any, target: Any, cosines: Any, sines: Any) -> None:
    half = cosines.size // 2
    for i in range(half):
        target[i] = source[i] * cosines[i] - source[half + i] * sines[i]
    for i in range(half):
        target[half + i] = source[half + i] * cosines[half + i] + source[i] * sines[half + i]
    for i in range(cosines.size, target.size):
        target[i] = source[i]


@internal
def _rotate_pairs(source: Any, target: Any, cosines: Any, sines: Any) -> None:
    for i in range(cosines.size // 2):
        first, second = source[2 * i], source[2 * i + 1]
        target[2 * i] = first * cosines[i] - second * sines[i]
        target[2 * i + 1] = second * cosines[i] + first * sines[i]
    for i in range(cosines.size, target.size):
        target[i] = source[i]


@internal
def _rotate_heads(source: Any, stride: Any, target: Any, num_heads: Any, dim: Any, angles: Any) -> None:
    cosines, sines, is_paired = angles
    for head in range(num_heads):
        own, place = FLOAT * stride * head, FLOAT * dim * head
        if is_paired:
            _rotate_pairs(float32_at(source + own, dim), float32_at(target + place, dim), cosines, sines)
        else:
            _rotate(float32_at(source + own, dim), float32_at(target + place, dim), cosines, sines)


@internal
def _multiply(x: Any, factor: Any) -> None:
    for i in range(x.size):
        x[i] *= factor


@internal
def _copy_heads(source: Any, stride: Any, target: Any, num_heads: Any, dim: Any) -> None:
    for head in range(num_heads):
        read = float32_at(source + FLOAT * stride * head, dim)
        written = float32_at(target + FLOAT * dim * head, dim)
        for i in range(dim):
            written[i] = read[i]


@internal
def _place_row(task: Any, row: Any, slot: Any) -> None:
    dim, value_dim, heads, kv_heads = task[KEY_DIM], task[VALUE_DIM], task[HEADS], task[KV_HEADS]
    place = FLOAT * task[ROTARY_DIM] * row
    angles = (
        float32_at(task[COSINES] + place, task[ROTARY_DIM]),
        float32_at(task[SINES] + place, task[ROTARY_DIM]),
        task[IS_PAIRED] != 0,
    )
    query, out = task[QUERY] + FLOAT * task[QUERY_ROW] * row, task[OUT] + FLOAT * heads * dim * row
    _rotate_heads(query, task[QUERY_HEAD], out, heads, dim, angles)
    if task[QUERY_SCALES] != 0:
        _multiply(float32_at(out, heads * dim), float32_at(task[QUERY_SCALES] + FLOAT * row, 1)[0])
    key, stored = task[KEY] + FLOAT * task[KEY_ROW] * row, task[KEY_POOL] + FLOAT * kv_heads * dim * slot
    _rotate_heads(key, task[KEY_HEAD], stored, kv_heads, dim, angles)
    value, stored = task[VALUE] + FLOAT * task[VALUE_ROW] * row, FLOAT * kv_heads * value_dim * slot
    _copy_heads(value, task[VALUE_HEAD], task[VALUE_POOL] + stored, kv_heads, value_dim)


@compiled_worker
def worker(task: Any) -> None:
    """Blocks of rows."""
    num_rows = task[NUM_ROWS]
    slots = int64_at(task[SLOTS], num_rows)
    item = next_item(task)
    while item >= 0:
        start = item * task[BLOCK_ROWS]
        for row in range(start, min(num_rows, start + task[BLOCK_ROWS])):
            _place_row(task, row, slots[row])
        item = next_item(task)
