"""Attention of a prompt chunk (CPU): oneDNN's products with a masked softmax between them.

The chunk goes through in blocks of rows, so that the scores of a block stay in the cache and no block pays
for context that it may not see. torch's own fused attention does its products by another library, which is
two to four times slower on some processors (docs/decisions.md).
Before it: the context gathered from the pool.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from logprobe.kernels import hooks
from logprobe.kernels.attention.api import NO_WINDOW
from logprobe.kernels.shapes import block_filled, width_filled, with_zeros
from logprobe.kernels.threads.intrinsics import maximum
from logprobe.kernels.threads.parallel import compiled_worker, float32_at, next_item, parallel_for
from logprobe.kernels.threads.vectors import F32, LOWEST, SUMS, ZERO, exponential, greatest

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.attention.api import ScoreRule

(SCORES, NUM_ROWS, WIDTH, BLOCK_ROWS, FIRST_SEEN, WINDOW, SETTINGS) = range(2, 9)
QUERY_BLOCK = 128
ITEM_ROWS = 8
_product = hooks.LINEAR.find()


def can_attend_chunks() -> bool:
    """Whether torch was built with oneDNN."""
    return hooks.has_onednn()


def attend_chunk(query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
    """Give each query row's attention over the context that ends with its own position.

    Args:
        query: (heads, num_rows, key_dim) float32, the last num_rows positions of the context.
        keys: (kv_heads, context, key_dim) float32.
        values: (kv_heads, context, value_dim) float32.
        rule: how scores are made.

    Returns:
        (heads, num_rows, value_dim) float32.
    """
    num_heads, num_rows, _ = query.shape
    num_kv_heads, context, value_dim = values.shape
    groups = num_heads // num_kv_heads
    out = query.new_empty(num_heads, num_rows, value_dim)
    for start in range(0, num_rows, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, num_rows)
        last = context - num_rows + end  # the context of the block's last row
        first = 0 if rule.window is None else max(0, context - num_rows + start + 1 - rule.window)
        more_rows = block_filled(end - start) - (end - start)
        more_width = width_filled(last - first) - (last - first)
        for head in range(num_kv_heads):
            heads = slice(head * groups, (head + 1) * groups)
            rows = with_zeros(query[heads, start:end], rows_before=more_rows).flatten(0, 1)
            block_keys = with_zeros(keys[head, first:last], rows=more_width)
            scores = _product(rows, block_keys, None, "none", [], "")
            soften_(scores, len(rows) // groups, last - first, rule.of_heads(heads))
            block_values = with_zeros(values[head, first:last].t(), columns=more_width)
            attended = _product(scores, block_values, None, "none", [], "")
            out[heads, start:end] = attended.view(groups, -1, value_dim)[:, more_rows:]
    return out


def soften_(scores: Tensor, block_rows: int, num_seen: int, rule: ScoreRule) -> None:
    """Turn scores into attention weights, in place.

    Row r stands for position r % block_rows of a block whose last row may see `num_seen` columns.

    Args:
        scores: (rows, columns) float32, contiguous; rows a multiple of block_rows.
        block_rows: positions of the block; those that would see nothing get zeros.
        num_seen: columns that hold context; zeros are written into those beyond.
        rule: how scores are made; the rows of one head after another, where it has sinks.
    """
    num_rows, width = scores.shape
    settings = rule.settings
    window = NO_WINDOW if rule.window is None else rule.window
    first_seen = num_seen - block_rows + 1  # columns that the block's first row may see
    context = [scores.data_ptr(), num_rows, width, block_rows, first_seen, window, settings.ctypes.data]
    parallel_for(worker(), context, (num_rows + ITEM_ROWS - 1) // ITEM_ROWS)


@njit(fastmath=SUMS)
def _exponentials(x: Any, largest: Any, scale: Any) -> Any:
    total = ZERO
    for i in range(x.size):
        d = (x[i] - largest) * scale
        d = LOWEST if d < LOWEST else d  # noqa: FURB136 - as in `vectors`
        e = exponential(d)
        x[i] = e
        total += e
    return total


@njit
def _scale(x: Any, factor: Any) -> None:
    for i in range(x.size):
        x[i] *= factor


@njit
def _cap(x: Any, scale: Any, softcap: Any) -> None:
    for i in range(x.size):
        x[i] = softcap * F32(math.tanh(x[i] * scale / softcap))


@njit
def _sink(task: Any, row: Any) -> Any:
    """The score that stands beside the context of a row's head; -inf where there is none."""
    count = np.int64(float32_at(task[SETTINGS], 3)[2])
    head = row // task[BLOCK_ROWS]
    return float32_at(task[SETTINGS], 3 + count)[3 + head] if count > 0 else F32(-np.inf)


@njit
def _soften_row(task: Any, row: Any, scale: Any, softcap: Any) -> None:
    width, sink = task[WIDTH], _sink(task, row)
    x = float32_at(task[SCORES] + 4 * width * row, width)
    end = task[FIRST_SEEN] + row % task[BLOCK_ROWS]
    if end <= 0:
        x[:] = ZERO
        return
    start = max(0, end - task[WINDOW])
    seen = x[start:end]
    if softcap > 0:
        _cap(seen, scale, softcap)
        scale = F32(1)
    largest = maximum(greatest(seen), sink / scale)
    total = _exponentials(seen, largest, scale) + exponential(max(sink - largest * scale, LOWEST))
    _scale(seen, F32(1) / total)
    x[:start] = ZERO
    x[end:] = ZERO


@compiled_worker()
def worker(task: Any) -> None:
    """Blocks of ITEM_ROWS rows of scores, each softened by itself."""
    settings = float32_at(task[SETTINGS], 2)
    item = next_item(task)
    while item >= 0:
        for row in range(item * ITEM_ROWS, min(task[NUM_ROWS], (item + 1) * ITEM_ROWS)):
            _soften_row(task, row, settings[0], settings[1])
        item = next_item(task)
