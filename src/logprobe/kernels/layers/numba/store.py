"""The loops of `layers.store`."""

from __future__ import annotations

from typing import Any

from logprobe.kernels.threads.numba.intrinsics import internal
from logprobe.kernels.threads.numba.tasks import float32_at, int64_at, next_item
from logprobe.kernels.threads.numba.workers import compiled_worker

(KEYS, KEY_POOL, KEY_WIDTH, VALUES, VALUE_POOL, VALUE_WIDTH, SLOTS, NUM_ROWS, BLOCK_ROWS) = range(2, 11)


@internal
def _copy(source: Any, target: Any) -> None:
    for i in range(target.size):
        target[i] = source[i]


@compiled_worker
def worker(task: Any) -> None:
    """Blocks of rows."""
    num_rows, key_width, value_width = task[NUM_ROWS], task[KEY_WIDTH], task[VALUE_WIDTH]
    slots = int64_at(task[SLOTS], num_rows)
    item = next_item(task)
    while item >= 0:
        start = item * task[BLOCK_ROWS]
        for row in range(start, min(num_rows, start + task[BLOCK_ROWS])):
            key = float32_at(task[KEYS] + 4 * key_width * row, key_width)
            _copy(key, float32_at(task[KEY_POOL] + 4 * key_width * slots[row], key_width))
            value = float32_at(task[VALUES] + 4 * value_width * row, value_width)
            _copy(value, float32_at(task[VALUE_POOL] + 4 * value_width * slots[row], value_width))
        item = next_item(task)
