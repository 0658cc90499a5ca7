"""The loops of `attention.chunk`."""

from __future__ import annotations

from typing import Any

import numpy as np

from logprobe.kernels.attention.chunk import MOST_PANELS
from logprobe.kernels.attention.numba.softmax import BLOCK_KEYS, cap, soften
from logprobe.kernels.layers.layout import FLOAT32, GROUP, PANEL, TILE_ROWS
from logprobe.kernels.layers.numba.turn import turn_rows
from logprobe.kernels.layers.numba.widen import tiles
from logprobe.kernels.processor import FLOAT
from logprobe.kernels.threads.numba.intrinsics import internal
from logprobe.kernels.threads.numba.tasks import (
    float32_at,
    float32_on_lines,
    float64_on_lines,
    int64_at,
    next_item,
)
from logprobe.kernels.threads.numba.vectors import F32, MINUS_INF
from logprobe.kernels.threads.numba.workers import compiled_worker

# What a task's numbers mean, after the two of `parallel_for`: addresses, strides in bytes, sizes.
(QUERY, KEYS, VALUES, SLOTS, OUT, SETTINGS) = range(2, 8)
(QUERY_ROW, QUERY_HEAD, KEY_ROW, KEY_HEAD, VALUE_ROW, VALUE_HEAD, OUT_ROW, OUT_HEAD) = range(8, 16)
(NUM_ROWS, CONTEXT, KV_HEADS, GROUPS, KEY_DIM, VALUE_DIM, WINDOW, NUM_BLOCKS, ITEM_LANES) = range(16, 25)
LANES = MOST_PANELS * PANEL
PANEL_FLOATS = FLOAT * PANEL

_multiply = tiles(FLOAT32)


@internal
def _copy(source: Any, size: Any, target: Any) -> None:
    row = float32_at(source, size)
    for i in range(size):
        target[i] = row[i]


@internal
def _load_queries(task: Any, item: Any, rows: Any, turned: Any, queries: Any) -> None:
    """Panels of an item's queries, scaled, each (width, PANEL); beyond its last row stand copies of it."""
    head, first, count = item
    dim, groups = task[KEY_DIM], task[GROUPS]
    scale = float32_at(task[SETTINGS], 1)[0]
    width = turned.size // TILE_ROWS
    for start in range(0, -(-count // PANEL) * PANEL, TILE_ROWS):
        for place in range(TILE_ROWS):
            lane = first + min(start + place, count - 1)
            source = task[QUERY_ROW] * (lane // groups) + task[QUERY_HEAD] * (head * groups + lane % groups)
            _copy(task[QUERY] + source, dim, rows[place * dim :])
        turn_rows(rows.ctypes.data, FLOAT * dim, TILE_ROWS, dim, width, turned)
        target = queries[start // PANEL * PANEL * width + start % PANEL :]
        for k in range(width):
            for place in range(TILE_ROWS):
                target[k * PANEL + place] = turned[k * TILE_ROWS + place] * scale


@internal
def _load_keys(task: Any, head: Any, slots: Any, rows: Any, keys: Any) -> None:
    """Tiles of keys, each (width, TILE_ROWS); in the last one, what was there before beside fewer keys."""
    dim = task[KEY_DIM]
    width = keys.size // BLOCK_KEYS
    for start in range(0, slots.size, TILE_ROWS):
        for place in range(min(TILE_ROWS, slots.size - start)):
            source = task[KEYS] + task[KEY_ROW] * slots[start + place] + task[KEY_HEAD] * head
            _copy(source, dim, rows[place * dim :])
        turn_rows(rows.ctypes.data, FLOAT * dim, TILE_ROWS, dim, width, keys[start * width :])


@internal
def _load_values(task: Any, head: Any, slots: Any, values: Any) -> None:
    """Tiles of dimensions, each (BLOCK_KEYS, TILE_ROWS); zeros for dimensions and keys that there are not."""
    dim = task[VALUE_DIM]
    whole = dim // TILE_ROWS
    for key in range(slots.size):
        row = float32_at(task[VALUES] + task[VALUE_ROW] * slots[key] + task[VALUE_HEAD] * head, dim)
        for tile in range(whole):
            target = values[(tile * BLOCK_KEYS + key) * TILE_ROWS :]
            for place in range(TILE_ROWS):
                target[place] = row[tile * TILE_ROWS + place]
        for place in range(dim - whole * TILE_ROWS):
            values[(whole * BLOCK_KEYS + key) * TILE_ROWS + place] = row[whole * TILE_ROWS + place]
    for tile in range(values.size // (BLOCK_KEYS * TILE_ROWS)):
        end = tile * BLOCK_KEYS + slots.size
        values[end * TILE_ROWS : (end + -slots.size % GROUP) * TILE_ROWS] = 0


@internal
def _hide(scores: Any, first_key: Any, positions: Any, window: Any) -> None:
    """-inf for the keys that a lane's row may not see."""
    for key in range(scores.size // PANEL):
        row, position = scores[key * PANEL : (key + 1) * PANEL], np.int32(first_key + key)
        for lane in range(PANEL):
            distance = positions[lane] - position
            is_seen = (distance >= 0) & (distance < window)
            row[lane] = row[lane] if is_seen else MINUS_INF


@internal
def _rescale(sums: Any, factors: Any) -> None:
    for start in range(0, sums.size, PANEL):
        for lane in range(PANEL):
            sums[start + lane] *= factors[lane]


@internal
def _score(task: Any, queries: Any, keys: Any, first_key: Any, positions: Any, scores: Any) -> None:
    """A panel's scores for a block of keys, (keys, PANEL), hidden where a row may not see."""
    width = queries.size // PANEL
    count, window = scores.size // PANEL, task[WINDOW]
    for start in range(0, count, TILE_ROWS):
        tile, target = keys[start * width :].ctypes.data, scores[start * PANEL :].ctypes.data
        _multiply(TILE_ROWS, queries.ctypes.data, width, tile, target)
    softcap = float32_at(task[SETTINGS], 2)[1]
    if softcap > 0:
        cap(scores, softcap)
    if positions[0] < first_key + count - 1 or positions[-1] - window >= first_key:
        _hide(scores, first_key, positions, np.int32(window))


@internal(error_model="numpy")
def _write(task: Any, item: Any, totals: Any, sums: Any, turned: Any) -> None:
    """A panel's results where they belong."""
    head, first, count = item
    dim, groups = task[VALUE_DIM], task[GROUPS]
    turn_rows(sums.ctypes.data, PANEL_FLOATS, sums.size // PANEL, PANEL, PANEL, turned)
    for place in range(count):
        lane, share = first + place, F32(1 / totals[place])
        target = task[OUT_ROW] * (lane // groups) + task[OUT_HEAD] * (head * groups + lane % groups)
        out = float32_at(task[OUT] + target, dim)
        for start in range(0, dim, TILE_ROWS):
            source = turned[start * PANEL + place * TILE_ROWS :]
            for i in range(min(TILE_ROWS, dim - start)):
                out[start + i] = source[i] * share


@internal
def _begin(task: Any, item: Any, positions: Any, largest: Any, totals: Any) -> None:
    """Each lane's position, and its sums before the first key: those of its head's sink, if there is one."""
    head, first, count = item
    groups = task[GROUPS]
    num_sinks = np.int64(float32_at(task[SETTINGS], 3)[2])
    sinks = float32_at(task[SETTINGS], 3 + num_sinks)[3:]
    for place in range(LANES):
        lane = first + min(place, count - 1)
        positions[place] = task[CONTEXT] - task[NUM_ROWS] + lane // groups
        largest[place] = sinks[head * groups + lane % groups] if num_sinks > 0 else MINUS_INF
        totals[place] = 1.0 if num_sinks > 0 else 0.0


@internal
def _attend_block(task: Any, block: Any, panel: Any, scores: Any, factors: Any) -> None:
    """Add to a panel's sums what it takes of a block of keys; a block that it does not see adds nothing."""
    first_key, num_keys, keys, values = block
    queries, positions, largest, totals, sums = panel
    width = queries.size // PANEL
    # What none of its rows sees is left out at both ends: a hidden key would add exact zeros.
    skipped = max(0, positions[0] + 1 - task[WINDOW] - first_key) // GROUP * GROUP
    num_keys = min(num_keys, np.int64(positions[-1]) + 1 - first_key) - skipped
    if num_keys <= 0:
        return
    first_key, keys, values = first_key + skipped, keys[skipped * width :], values[skipped * TILE_ROWS :]
    filled = num_keys + -num_keys % GROUP
    scores[: filled * PANEL] = 0
    _score(task, queries, keys, first_key, positions, scores[: num_keys * PANEL])
    scores[num_keys * PANEL : filled * PANEL] = 0
    state = (largest.ctypes.data, totals.ctypes.data, factors.ctypes.data)
    if soften(scores.ctypes.data, num_keys, *state):
        _rescale(sums, factors)
    for dim in range(0, sums.size // PANEL, TILE_ROWS):
        tile, target = values[dim * BLOCK_KEYS :].ctypes.data, sums[dim * PANEL :].ctypes.data
        _multiply(TILE_ROWS, scores.ctypes.data, filled, tile, target)


@compiled_worker
def worker(task: Any) -> None:
    """Some panels of query rows of one key head each."""
    width = task[KEY_DIM] + -task[KEY_DIM] % GROUP
    dims = task[VALUE_DIM] + -task[VALUE_DIM] % TILE_ROWS
    queries, sums = float32_on_lines(LANES * width), float32_on_lines(LANES * dims)
    keys, values = float32_on_lines(BLOCK_KEYS * width), float32_on_lines(BLOCK_KEYS * dims)
    scores, rows = float32_on_lines(BLOCK_KEYS * PANEL), float32_on_lines(TILE_ROWS * width)
    turned = float32_on_lines(max(TILE_ROWS * width, PANEL * dims))
    largest, totals, factors = float32_on_lines(LANES), float64_on_lines(LANES), float32_on_lines(PANEL)
    positions = np.empty(LANES, np.int32)
    slots = int64_at(task[SLOTS], task[CONTEXT])
    rows[:], values[:] = 0, 0
    item = next_item(task)
    while item >= 0:
        # The last rows see the most: they go first, so that no thread is left with them at the end.
        head, first = item % task[KV_HEADS], task[NUM_BLOCKS] - 1 - item // task[KV_HEADS]
        first *= task[ITEM_LANES]
        count = min(task[ITEM_LANES], task[NUM_ROWS] * task[GROUPS] - first)
        part = (head, first, count)
        _load_queries(task, part, rows, turned[: TILE_ROWS * width], queries)
        _begin(task, part, positions, largest, totals)
        sums[:] = 0
        seen_from, end = max(0, positions[0] + 1 - task[WINDOW]), np.int64(positions[-1]) + 1
        for first_key in range(seen_from // BLOCK_KEYS * BLOCK_KEYS, end, BLOCK_KEYS):
            seen = slots[first_key : min(end, first_key + BLOCK_KEYS)]
            _load_keys(task, head, seen, rows, keys)
            _load_values(task, head, seen, values)
            block = (first_key, seen.size, keys, values)
            for lane in range(0, count, PANEL):
                own = slice(lane, lane + PANEL)
                panel_sums = sums[lane * dims : (lane + PANEL) * dims]
                panel = (
                    queries[lane * width : (lane + PANEL) * width],
                    positions[own],
                    largest[own],
                    totals[own],
                    panel_sums,
                )
                _attend_block(task, block, panel, scores, factors)
        for lane in range(0, count, PANEL):
            panel_sums = sums[lane * dims : (lane + PANEL) * dims]
            _write(task, (head, first + lane, min(PANEL, count - lane)), totals[lane:], panel_sums, turned)
        item = next_item(task)
