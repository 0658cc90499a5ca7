"""The compiled form of `attend_rows`: an item is one row, with all its heads where there are rows enough.

Two passes over the context: scores with their maximum, then weights and the weighted sum of the values. Each
key and each value is read once for the whole group of query heads that share it. The slots of a context may
lie anywhere, which no processor foresees: each is fetched some slots ahead of its turn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from logprobe.kernels.threads.intrinsics import FLOAT, LINE, internal, maximum, prefetch_line
from logprobe.kernels.threads.parallel import compiled_worker, float32_at, int32_at, next_item
from logprobe.kernels.threads.vectors import F32, LOWEST, SUMS, exponential, greatest

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
AHEAD = 8  # slots between the one that is read and the one that is fetched


@internal(fastmath=SUMS)
def _dot(a: Any, b: Any) -> Any:
    total = F32(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@internal
def _add_scaled(out: Any, weight: Any, x: Any) -> None:
    for i in range(out.size):
        out[i] += weight * x[i]


@internal
def _soften(scores: Any, best: Any) -> Any:
    """Turn scores into weights, in place; their sum."""
    total = F32(0)
    for j in range(scores.size):
        scores[j] = exponential(max(scores[j] - best, LOWEST))
    for j in range(scores.size):
        total += scores[j]
    return total


@internal
def _prefetch(address: Any, num_bytes: Any) -> None:
    for offset in range(0, num_bytes, LINE):
        prefetch_line(address + offset)


@internal
def _score(task: Any, slots: Any, query: Any, heads: Any, scores: Any) -> None:
    """Scores of all queries of some key/value heads against the keys in `slots`."""
    settings, dim, count = float32_at(task[SETTINGS], 2), task[KEY_DIM], slots.size
    groups, pool_row = task[HEADS] // task[KV_HEADS], FLOAT * task[KV_HEADS] * dim
    keys = task[KEYS] + FLOAT * heads[0] * dim
    num_heads = heads[1] - heads[0]
    for j in range(count):
        ahead = np.int64(slots[min(j + AHEAD, count - 1)])
        _prefetch(keys + pool_row * ahead, FLOAT * num_heads * dim)
        place = keys + pool_row * np.int64(slots[j])
        for h in range(num_heads):
            key = float32_at(place + FLOAT * h * dim, dim)
            for g in range(h * groups, (h + 1) * groups):
                score = _dot(float32_at(query + FLOAT * g * dim, dim), key) * settings[0]
                if settings[1] > 0:
                    score = settings[1] * F32(math.tanh(score / settings[1]))
                scores[g * count + j] = score


@internal
def _sink(task: Any, head: Any) -> Any:
    """The score that stands beside a head's context; -inf where there is none."""
    count = np.int64(float32_at(task[SETTINGS], 3)[2])
    return float32_at(task[SETTINGS], 3 + count)[3 + head] if count > 0 else F32(-np.inf)


@internal
def _normalise(own: Any, sink: Any) -> None:
    best = maximum(sink, greatest(own))
    inverse = F32(1) / (_soften(own, best) + exponential(max(sink - best, LOWEST)))
    for j in range(own.size):
        own[j] *= inverse


@internal
def _sum_values(task: Any, slots: Any, out: Any, heads: Any, scores: Any) -> None:
    """Each query's values, weighted."""
    dim, count = task[VALUE_DIM], slots.size
    groups, pool_row = task[HEADS] // task[KV_HEADS], FLOAT * task[KV_HEADS] * dim
    values = task[VALUES] + FLOAT * heads[0] * dim
    num_heads = heads[1] - heads[0]
    for j in range(count):
        ahead = np.int64(slots[min(j + AHEAD, count - 1)])
        _prefetch(values + pool_row * ahead, FLOAT * num_heads * dim)
        place = values + pool_row * np.int64(slots[j])
        for h in range(num_heads):
            value = float32_at(place + FLOAT * h * dim, dim)
            for g in range(h * groups, (h + 1) * groups):
                _add_scaled(float32_at(out + FLOAT * g * dim, dim), scores[g * count + j], value)


@internal
def _attend(task: Any, row: Any, heads: Any, scores: Any) -> None:
    lengths, begins = int32_at(task[LENGTHS], task[NUM_ROWS]), int32_at(task[BEGINS], task[NUM_ROWS])
    start = max(0, lengths[row] - task[WINDOW])
    count = lengths[row] - start
    slots = int32_at(task[SLOTS] + FLOAT * (begins[row] + start), count)
    groups = task[HEADS] // task[KV_HEADS]
    place = np.int64(int32_at(task[ROWS], task[NUM_ROWS])[row]) * task[HEADS] + heads[0] * groups
    num_queries = (heads[1] - heads[0]) * groups
    out = task[OUT] + FLOAT * place * task[VALUE_DIM]
    _score(task, slots, task[QUERY] + FLOAT * place * task[KEY_DIM], heads, scores)
    for g in range(num_queries):
        _normalise(scores[g * count : (g + 1) * count], _sink(task, heads[0] * groups + g))
    float32_at(out, num_queries * task[VALUE_DIM])[:] = F32(0)
    _sum_values(task, slots, out, heads, scores)


@compiled_worker()
def worker(task: Any) -> None:
    """One row of the plan an item, or one row's part of the key/value heads."""
    lengths = int32_at(task[LENGTHS], task[NUM_ROWS])
    longest = np.int64(0)
    for length in lengths:
        longest = max(longest, np.int64(length))
    parts, groups = task[PARTS], task[HEADS] // task[KV_HEADS]
    scores = np.empty(longest * groups * (task[KV_HEADS] // parts), dtype=np.float32)
    item = next_item(task)
    while item >= 0:
        part = item % parts
        heads = (part * task[KV_HEADS] // parts, (part + 1) * task[KV_HEADS] // parts)
        _attend(task, item // parts, heads, scores)
        item = next_item(task)
