"""The loops of `attend_rows`: an item is one row, with all its heads where there are rows enough.

A key or a value is read where it lies, once for up to four query heads that share it. Scores, softmax and
weighted sums go through the context by the blocks of `chunk`, each sum in its order: a row has the same bits,
whichever of the two attends it. The slots of a context may lie anywhere, which no processor foresees: each is
fetched some slots ahead of its turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from logprobe.kernels.attention.numba.lanes import (
    KEYS_AT_ONCE,
    QUERIES_AT_ONCE,
    VALUES_AT_ONCE,
    score_few,
    score_many,
    weigh_one,
    weigh_several,
)
from logprobe.kernels.attention.numba.softmax import BLOCK_KEYS, LEAST, cap
from logprobe.kernels.layers.numba.widen import LANES
from logprobe.kernels.processor import FLOAT, LINE
from logprobe.kernels.threads.numba.intrinsics import internal, prefetch_line
from logprobe.kernels.threads.numba.tasks import (
    float32_at,
    float32_on_lines,
    float64_on_lines,
    int32_at,
    next_item,
)
from logprobe.kernels.threads.numba.vectors import F32, LOWEST, MINUS_INF, ZERO, exponential, greatest
from logprobe.kernels.threads.numba.workers import compiled_worker

# What a task's numbers mean, after the two of `parallel_for`: addresses unless said otherwise.
(
    QUERY,  # (num_tokens, heads, key_dim)
    KEYS,  # (num_slots, kv_heads, key_dim)
    VALUES,  # (num_slots, kv_heads, value_dim)
    OUT,  # (num_tokens, heads, value_dim)
    ROWS,  # (num_rows,) int32, of query and out
    BEGINS,  # (num_rows,) int32, into slots
    LENGTHS,  # (num_rows,) int32
    SLOTS,  # int32
    SETTINGS,  # scale, softcap, number of sinks, sinks
    NUM_ROWS,
    NUM_SLOTS,
    HEADS,
    KV_HEADS,
    KEY_DIM,
    VALUE_DIM,
    WINDOW,
    PARTS,  # of the key/value heads, an item each: 1, or as many as there are heads
) = range(2, 19)


@internal
def _find(start: Any, stride: Any, slots: Any, first: Any, places: Any, num_bytes: Any) -> None:
    """Where the next few slots lie; beyond the last, it again. Those after them are fetched."""
    last = slots.size - 1
    for i in range(places.size):
        places[i] = start + stride * np.int64(slots[min(first + i, last)])
        ahead = start + stride * np.int64(slots[min(first + i + places.size, last)])
        for offset in range(0, num_bytes, LINE):
            prefetch_line(ahead + offset)


@internal
def _load_queries(task: Any, query: Any, count: Any, queries: Any) -> None:
    """Scaled queries of some heads, (count, key_dim)."""
    row, scale = float32_at(query, count * task[KEY_DIM]), float32_at(task[SETTINGS], 1)[0]
    for i in range(row.size):
        queries[i] = row[i] * scale


@internal
def _begin(task: Any, head: Any, count: Any, largest: Any, totals: Any) -> None:
    """Each query's sums before the first key: those of its head's sink, if there is one."""
    num_sinks = np.int64(float32_at(task[SETTINGS], 3)[2])
    sinks = float32_at(task[SETTINGS], 3 + num_sinks)[3:]
    for number in range(count):
        largest[number] = sinks[head + number] if num_sinks > 0 else MINUS_INF
        totals[number] = 1.0 if num_sinks > 0 else 0.0


@internal
def _score(task: Any, head: Any, slots: Any, queries: Any, places: Any, scores: Any) -> None:
    """Scores of some queries for a block of keys, (queries, BLOCK_KEYS)."""
    dim = task[KEY_DIM]
    start, stride = task[KEYS] + FLOAT * dim * head, FLOAT * dim * task[KV_HEADS]
    count = queries.size // dim
    for first in range(0, slots.size, KEYS_AT_ONCE):
        target = scores[first:].ctypes.data
        if slots.size - first > LANES:
            _find(start, stride, slots, first, places, FLOAT * dim)
            score_many(count, queries.ctypes.data, dim, places.ctypes.data, target)
        else:
            _find(start, stride, slots, first, places[:LANES], 0)
            score_few(count, queries.ctypes.data, dim, places.ctypes.data, target)
    softcap = float32_at(task[SETTINGS], 2)[1]
    if softcap > 0:
        for number in range(count):
            cap(scores[number * BLOCK_KEYS :][: slots.size], softcap)


@internal
def _exponential(x: Any, reference: Any) -> Any:
    d = x - reference
    return exponential(LOWEST if d < LOWEST else d)  # noqa: FURB136 (this way round, NaN stays NaN)


@internal
def _soften(scores: Any, largest: Any) -> Any:
    """Exponentials in the place of one query's scores; what earlier blocks' sums take."""
    before = largest[0]
    largest[0] = max(before, greatest(scores))
    reference = max(largest[0], F32(LEAST))
    for key in range(scores.size):
        weight = _exponential(scores[key], reference)
        scores[key] = ZERO if scores[key] < F32(LEAST) else weight
    return _exponential(before, reference)


@internal
def _add_weights(weights: Any, count: Any, totals: Any, factors: Any) -> None:
    """Add a block's weights, (QUERIES_AT_ONCE, BLOCK_KEYS), to each query's float64 total, key after key.

    The four sums are independent, so their additions overlap.
    """
    a, b, c, d = (
        totals[0] * factors[0],
        totals[1] * factors[1],
        totals[2] * factors[2],
        totals[3] * factors[3],
    )
    for key in range(count):
        a += weights[key]
        b += weights[BLOCK_KEYS + key]
        c += weights[2 * BLOCK_KEYS + key]
        d += weights[3 * BLOCK_KEYS + key]
    totals[0], totals[1], totals[2], totals[3] = a, b, c, d


@internal
def _sum_values(task: Any, head: Any, slots: Any, weights: Any, places: Any, sums: Any) -> None:
    """Each query's values of a block, weighted, (queries, value_dim)."""
    dim = task[VALUE_DIM]
    start, stride = task[VALUES] + FLOAT * dim * head, FLOAT * dim * task[KV_HEADS]
    places = places[:VALUES_AT_ONCE]
    whole = slots.size // VALUES_AT_ONCE * VALUES_AT_ONCE
    sums[:] = 0
    for first in range(0, whole, VALUES_AT_ONCE):
        _find(start, stride, slots, first, places, FLOAT * dim)
        for number in range(sums.size // dim):
            own, target = weights[number * BLOCK_KEYS + first :], sums[number * dim :]
            weigh_several(own.ctypes.data, places.ctypes.data, dim, target.ctypes.data)
    for key in range(whole, slots.size):
        _find(start, stride, slots, key, places[:1], 0)
        for number in range(sums.size // dim):
            own, target = weights[number * BLOCK_KEYS + key :], sums[number * dim :]
            weigh_one(own.ctypes.data, places.ctypes.data, dim, target.ctypes.data)


@internal
def _add(sums: Any, factor: Any, summands: Any) -> None:
    for i in range(sums.size):
        sums[i] = sums[i] * factor + summands[i]


@internal(error_model="numpy")
def _write(totals: Any, sums: Any, out: Any) -> None:
    dim = out.size // totals.size
    for number in range(totals.size):
        share = F32(1 / totals[number])
        for i in range(number * dim, (number + 1) * dim):
            out[i] = sums[i] * share


@internal
def _attend(task: Any, row: Any, part: Any, scratch: Any) -> None:
    """One row of some query heads that share a key head: its number, their first, how many."""
    head, first_query, count = part
    queries, scores, block, sums, (largest, totals, factors), places = scratch
    length = np.int64(int32_at(task[LENGTHS], task[NUM_ROWS])[row])
    begin = int32_at(task[BEGINS], task[NUM_ROWS])[row]
    slots = int32_at(task[SLOTS] + FLOAT * begin, length)
    dim = task[VALUE_DIM]
    place = np.int64(int32_at(task[ROWS], task[NUM_ROWS])[row]) * task[HEADS] + first_query
    queries, block, sums = queries[: count * task[KEY_DIM]], block[: count * dim], sums[: count * dim]
    _load_queries(task, task[QUERY] + FLOAT * task[KEY_DIM] * place, count, queries)
    _begin(task, first_query, count, largest, totals)
    sums[:] = 0
    start = max(0, length - task[WINDOW])
    for first_key in range(start // BLOCK_KEYS * BLOCK_KEYS, length, BLOCK_KEYS):
        seen = slots[max(start, first_key) : min(length, first_key + BLOCK_KEYS)]
        _score(task, head, seen, queries, places, scores)
        for number in range(count):
            own = scores[number * BLOCK_KEYS :][: seen.size]
            factors[number] = _soften(own, largest[number:])
        _add_weights(scores, seen.size, totals, factors)
        _sum_values(task, head, seen, scores, places, block)
        for number in range(count):
            mine = slice(number * dim, (number + 1) * dim)
            _add(sums[mine], factors[number], block[mine])
    _write(totals[:count], sums, float32_at(task[OUT] + FLOAT * dim * place, count * dim))


@compiled_worker
def worker(task: Any) -> None:
    """One row of the plan an item, or one row's part of the key/value heads."""
    parts, groups = task[PARTS], task[HEADS] // task[KV_HEADS]
    scratch = (
        float32_on_lines(QUERIES_AT_ONCE * task[KEY_DIM]),
        float32_on_lines(QUERIES_AT_ONCE * BLOCK_KEYS),
        float32_on_lines(QUERIES_AT_ONCE * task[VALUE_DIM]),
        float32_on_lines(QUERIES_AT_ONCE * task[VALUE_DIM]),
        (
            float32_on_lines(QUERIES_AT_ONCE),
            float64_on_lines(QUERIES_AT_ONCE),
            float32_on_lines(QUERIES_AT_ONCE),
        ),
        np.empty(KEYS_AT_ONCE, np.int64),
    )
    item = next_item(task)
    while item >= 0:
        part = item % parts
        for head in range(part * task[KV_HEADS] // parts, (part + 1) * task[KV_HEADS] // parts):
            for first in range(0, groups, QUERIES_AT_ONCE):
                count = min(QUERIES_AT_ONCE, groups - first)
                _attend(task, item // parts, (head, head * groups + first, count), scratch)
        item = next_item(task)
