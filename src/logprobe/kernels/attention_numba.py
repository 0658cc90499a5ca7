"""The compiled form of `attend_rows`: an item is one row with one key/value head and its group of queries.

Two passes over the context: scores with their maximum, then weights and the weighted sum of the values. Each
key and each value is read once for the whole group of query heads that share it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cfunc, njit

from logprobe.kernels import vectors
from logprobe.kernels.parallel import Worker, compile_worker, float32_at, int32_at, next_item, task_at
from logprobe.kernels.vectors import F32, LOWEST, SUMS, exponential, maximum

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
    SETTINGS,  # scale, softcap
    NUM_ROWS,
    NUM_SLOTS,
    HEADS,
    KV_HEADS,
    KEY_DIM,
    VALUE_DIM,
    WINDOW,
) = range(2, 18)
FLOAT = 4  # bytes


@njit(fastmath=SUMS)
def _dot(a: Any, b: Any) -> Any:
    total = F32(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@njit
def _add_scaled(out: Any, weight: Any, x: Any) -> None:
    for i in range(out.size):
        out[i] += weight * x[i]


@njit
def _soften(scores: Any, best: Any) -> Any:
    """Turn scores into weights, in place; their sum."""
    total = F32(0)
    for j in range(scores.size):
        scores[j] = exponential(max(scores[j] - best, LOWEST))
    for j in range(scores.size):
        total += scores[j]
    return total


@njit
def _attend(task: Any, row: Any, head: Any, scores: Any) -> None:
    lengths, begins = int32_at(task[LENGTHS], task[NUM_ROWS]), int32_at(task[BEGINS], task[NUM_ROWS])
    settings, rows = float32_at(task[SETTINGS], 2), int32_at(task[ROWS], task[NUM_ROWS])
    key_dim, value_dim = task[KEY_DIM], task[VALUE_DIM]
    groups = task[HEADS] // task[KV_HEADS]
    start = max(0, lengths[row] - task[WINDOW])
    count = lengths[row] - start
    slots = int32_at(task[SLOTS] + 4 * (begins[row] + start), count)
    first_head = np.int64(rows[row]) * task[HEADS] + head * groups
    query = task[QUERY] + FLOAT * first_head * key_dim
    out = task[OUT] + FLOAT * first_head * value_dim
    for j in range(count):
        place = np.int64(slots[j]) * task[KV_HEADS] + head
        key = float32_at(task[KEYS] + FLOAT * place * key_dim, key_dim)
        for g in range(groups):
            score = _dot(float32_at(query + FLOAT * g * key_dim, key_dim), key) * settings[0]
            if settings[1] > 0:
                score = settings[1] * F32(math.tanh(score / settings[1]))
            scores[g * count + j] = score
    for g in range(groups):
        own = scores[g * count : (g + 1) * count]
        best = F32(-np.inf)
        for j in range(count):
            best = maximum(best, own[j])
        inverse = F32(1) / _soften(own, best)
        for j in range(count):
            own[j] *= inverse
        float32_at(out + FLOAT * g * value_dim, value_dim)[:] = F32(0)
    for j in range(count):
        place = np.int64(slots[j]) * task[KV_HEADS] + head
        value = float32_at(task[VALUES] + FLOAT * place * value_dim, value_dim)
        for g in range(groups):
            _add_scaled(float32_at(out + FLOAT * g * value_dim, value_dim), scores[g * count + j], value)


@njit
def _attend_all(task: Any) -> None:
    lengths = int32_at(task[LENGTHS], task[NUM_ROWS])
    longest = np.int64(0)
    for length in lengths:
        longest = max(longest, np.int64(length))
    scores = np.empty(longest * (task[HEADS] // task[KV_HEADS]), dtype=np.float32)
    item = next_item(task)
    while item >= 0:
        _attend(task, item // task[KV_HEADS], item % task[KV_HEADS], scores)
        item = next_item(task)


def _make_worker(digest: int, *, cache: bool) -> Any:
    @cfunc("void(voidptr)", cache=cache)
    def attention_worker(address: Any) -> None:
        if digest >= 0:
            _attend_all(task_at(address))

    return attention_worker


@functools.cache
def worker() -> Worker:
    """The compiled worker."""
    return compile_worker(_make_worker, __file__, vectors.__file__)
