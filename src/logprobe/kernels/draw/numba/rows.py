"""The loops of `draw`: one pass for the maximum, one for the weights, one to find the token.

Truncation sorts nothing but the tokens of one bin: weights are summed and counted by how far their logit
lies below the maximum, the bin in which top-k or top-p ends is found from the sums, and only its tokens
are put in order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from logprobe.kernels.threads.numba.intrinsics import BLOCK, internal
from logprobe.kernels.threads.numba.tasks import float32_at, int32_at, next_item, uint8_at
from logprobe.kernels.threads.numba.vectors import (
    F32,
    I32,
    LOWEST,
    MINUS_INF,
    SUMS,
    ZERO,
    exponential,
    greatest,
)
from logprobe.kernels.threads.numba.workers import compiled_worker

BINS_PER_UNIT = F32(32)  # of (maximum - logit) / temperature
NUM_BINS = 87 * 32 + 1  # the last bin takes all that weighs next to nothing (`LOWEST`)


@internal(fastmath=SUMS)
def _zero_products(x: Any) -> Any:
    """Zero, or NaN where a value is NaN or infinite."""
    total = ZERO
    for i in range(x.size):
        total += x[i] * ZERO
    return total


@internal
def _has_nan(x: Any) -> Any:
    for value in x:  # noqa: SIM110 - compiled
        if np.isnan(value):
            return True
    return False


@internal
def _maximum(row: Any) -> Any:
    """The largest value (NaN where one is NaN) and the first place that holds it."""
    best, place = MINUS_INF, 0
    for start in range(0, row.size, BLOCK):
        block = row[start : start + BLOCK]
        if np.isnan(_zero_products(block)) and _has_nan(block):
            return F32(np.nan), 0
        top = greatest(block)
        if top > best:
            best, place = top, start
    while place < row.size and row[place] != best:
        place += 1
    return best, place


@internal
def _weigh(x: Any, best: Any, temperature: Any, weights: Any, bins: Any) -> None:
    """The weight of each value, exp((x - best) / temperature), and its bin."""
    for i in range(x.size):
        d = (x[i] - best) / temperature
        d = LOWEST if d < LOWEST else d  # noqa: FURB136 - as in `vectors`
        weights[i] = exponential(d)
        bins[i] = I32(d * BINS_PER_UNIT)


@internal
def _histogram(row: Any, best: Any, temperature: Any, mass: Any, count: Any) -> None:
    """Mass and number of the tokens in each bin; a token that is masked out is in none."""
    weights, bins = np.empty(BLOCK, dtype=np.float32), np.empty(BLOCK, dtype=np.int32)
    mass[:] = 0
    count[:] = 0
    for start in range(0, row.size, BLOCK):
        block = row[start : start + BLOCK]
        _weigh(block, best, temperature, weights, bins)
        for i in range(block.size):
            if block[i] > MINUS_INF:
                mass[-bins[i]] += weights[i]
                count[-bins[i]] += 1


@internal
def _members(row: Any, best: Any, temperature: Any, place: Any, size: Any) -> Any:
    """The ids of one bin, by descending logit and ascending id."""
    weights, bins = np.empty(BLOCK, dtype=np.float32), np.empty(BLOCK, dtype=np.int32)
    ids = np.empty(size, dtype=np.int64)
    found = 0
    for start in range(0, row.size, BLOCK):
        block = row[start : start + BLOCK]
        _weigh(block, best, temperature, weights, bins)
        for i in range(block.size):
            if bins[i] == -place and block[i] > MINUS_INF:
                ids[found] = start + i
                found += 1
    return ids[np.argsort(-row[ids], kind="mergesort")]


@internal
def _end_by_count(count: Any, limit: Any) -> Any:
    """Where the first `limit` tokens end: a bin, and how many of its tokens belong to them."""
    place, last = 0, 0
    while place < NUM_BINS:
        if count[place] > 0:
            if limit <= count[place]:
                return place, limit
            limit -= count[place]
            last = place
        place += 1
    return last, count[last]


@internal
def _weight(value: Any, best: Any, temperature: Any) -> Any:
    return np.float64(exponential(max((value - best) / temperature, LOWEST)))


@internal
def _cut(row: Any, best: Any, settings: Any, mass: Any, count: Any) -> Any:
    """The logit and the id of the last token that top-k and top-p keep; -inf: all."""
    temperature, top_k, top_p = settings[0], settings[1], settings[2]
    limit = min(np.int64(row.size), np.int64(top_k)) if top_k > 0 else np.int64(row.size)
    place, number = _end_by_count(count, limit)
    ids = _members(row, best, temperature, place, count[place])
    if top_p < 1:
        total = mass[:place].sum()
        for i in ids[:number]:
            total += _weight(row[i], best, temperature)
        wanted, reached, end = total * top_p, 0.0, 0
        while end < place and reached + mass[end] < wanted:
            reached += mass[end]
            end += 1
        if end < place:
            ids = _members(row, best, temperature, end, count[end])
            place, number = end, count[end]
        kept = 0
        while kept < number - 1 and reached + _weight(row[ids[kept]], best, temperature) < wanted:
            reached += _weight(row[ids[kept]], best, temperature)
            kept += 1
        number = kept + 1
    if number == count[place] and count[place + 1 :].sum() == 0:
        return MINUS_INF, np.int64(row.size)
    return row[ids[number - 1]], ids[number - 1]


@internal(fastmath=SUMS)
def _mass_above(x: Any, best: Any, temperature: Any, cut: Any) -> Any:
    """Sum of exp((x - best) / temperature) over the values strictly above the cut."""
    total = ZERO
    for i in range(x.size):
        d = (x[i] - best) / temperature
        d = LOWEST if d < LOWEST else d  # noqa: FURB136
        e = exponential(d)
        total += e if x[i] > cut else ZERO
    return total


@internal
def _num_at(x: Any, value: Any) -> Any:
    count = I32(0)
    for i in range(x.size):
        count += I32(x[i] == value)
    return count


@internal
def _block_mass(row: Any, start: Any, best: Any, temperature: Any, cut_logit: Any, cut_id: Any) -> Any:
    """The weight of what is kept of one block; tokens at the cut count up to the cut's id."""
    block = row[start : start + BLOCK]
    total = np.float64(_mass_above(block, best, temperature, cut_logit))
    if cut_logit > MINUS_INF and start <= cut_id:
        ties = _num_at(row[start : min(start + BLOCK, cut_id + 1)], cut_logit)
        total += ties * _weight(cut_logit, best, temperature)
    return total


@internal
def _pick(row: Any, best: Any, temperature: Any, cut_logit: Any, cut_id: Any, uniform: Any) -> Any:
    """The kept token at which the cumulative weight, in order of ids, passes `uniform` of the whole."""
    num_blocks = (row.size + BLOCK - 1) // BLOCK
    sums = np.empty(num_blocks, dtype=np.float64)
    for b in range(num_blocks):
        sums[b] = _block_mass(row, b * BLOCK, best, temperature, cut_logit, cut_id)
    left = sums.sum() * uniform
    b, last = 0, num_blocks - 1
    while last > 0 and sums[last] == 0:  # rounding must not carry the search past all weight
        last -= 1
    while b < last and left >= sums[b]:
        left -= sums[b]
        b += 1
    chosen = -1
    for i in range(b * BLOCK, min(row.size, (b + 1) * BLOCK)):
        is_kept = row[i] > cut_logit or (row[i] == cut_logit and i <= cut_id)
        if is_kept and row[i] > MINUS_INF:
            chosen = i
            left -= _weight(row[i], best, temperature)
            if left < 0:
                break
    return chosen


@internal
def _draw_row(row: Any, settings: Any, token_ids: Any, cut_logits: Any, cut_ids: Any, is_valid: Any) -> None:
    """Draw one row; the outputs are views of its own entry."""
    best, place = _maximum(row)
    token_ids[0], cut_logits[0], cut_ids[0] = place, MINUS_INF, row.size
    is_valid[0] = np.isfinite(best)
    temperature = settings[0]
    if not np.isfinite(best) or temperature == 0:
        return
    cut_logit, cut_id = MINUS_INF, np.int64(row.size)
    if settings[1] > 0 or settings[2] < 1:
        mass, count = np.empty(NUM_BINS, dtype=np.float64), np.empty(NUM_BINS, dtype=np.int64)
        _histogram(row, best, temperature, mass, count)
        cut_logit, cut_id = _cut(row, best, settings, mass, count)
    if settings[3] > 0:
        floor = np.float32(best + temperature * math.log(settings[3]))
        if floor > cut_logit:
            cut_logit, cut_id = floor, np.int64(row.size)
    cut_logits[0], cut_ids[0] = cut_logit, cut_id
    uniform = np.float64(settings[4]) + np.float64(settings[5])
    token_ids[0] = _pick(row, best, temperature, cut_logit, cut_id, uniform)


@compiled_worker
def worker(task: Any) -> None:
    """One row an item."""
    width, num_rows = task[3], task[10]
    token_ids, cut_logits = int32_at(task[6], num_rows), float32_at(task[7], num_rows)
    cut_ids, is_valid = int32_at(task[8], num_rows), uint8_at(task[9], num_rows)
    item = next_item(task)
    while item >= 0:
        row = float32_at(task[2] + task[4] * item, width)
        settings = float32_at(task[5] + 24 * item, 6)
        one = slice(item, item + 1)
        _draw_row(row, settings, token_ids[one], cut_logits[one], cut_ids[one], is_valid[one])
        item = next_item(task)
