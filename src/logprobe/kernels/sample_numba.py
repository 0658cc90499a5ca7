"""The compiled form of `draw`: one pass for the maximum, one for the weights, one to find the token.

Truncation sorts nothing but the tokens of one bin: weights are summed and counted by how far their logit
lies below the maximum, the bin in which top-k or top-p ends is found from the sums, and only its tokens
are put in order.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cfunc, njit

from logprobe.kernels.parallel import (
    Worker,
    compile_worker,
    float32_at,
    int32_at,
    next_item,
    parallel_for,
    task_at,
    uint8_at,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from logprobe.kernels.sample import DrawParams, Drawn

BLOCK = 1024
NUM_BINS = 2048
BIN_WIDTH = np.float32(32 / NUM_BINS)  # of (maximum - logit) / temperature; the last bin takes all the rest


def draw_rows(logits: NDArray[np.float32], params: DrawParams, drawn: Drawn) -> None:
    """Fill `drawn` from (B, V) float32 logits, rows on all of torch's threads."""
    # One row of settings: temperature, top_k, top_p, min_p, and the uniform number as two halves.
    high = params.uniforms.astype(np.float32)
    low = (params.uniforms - high).astype(np.float32)
    settings = np.stack(
        [params.temperatures, params.top_ks, params.top_ps, params.min_ps, high, low],
        axis=1,
        dtype=np.float32,
    )
    context = [
        logits.ctypes.data, logits.shape[1], logits.strides[0], settings.ctypes.data,
        drawn.token_ids.ctypes.data, drawn.cut_logits.ctypes.data, drawn.cut_ids.ctypes.data,
        drawn.is_valid.ctypes.data, len(logits),
    ]  # fmt: skip
    parallel_for(worker(), context, len(logits))


@njit
def _maximum(row: Any) -> Any:
    """The largest value (NaN where one is NaN) and the first place that holds it."""
    best, place = np.float32(-np.inf), 0
    for start in range(0, row.size, BLOCK):
        block = row[start : start + BLOCK]
        top = np.float32(-np.inf)
        total = np.float32(0)
        for i in range(block.size):
            top = max(top, block[i])
            total += np.float32(0) * block[i]  # NaN where a value is NaN or infinite
        if total != total and _has_nan(block):
            return np.float32(np.nan), 0
        if top > best:
            best = top
            place = start
    while place < row.size and row[place] != best:
        place += 1
    return best, place


@njit
def _has_nan(block: Any) -> Any:
    for value in block:  # noqa: SIM110 - compiled
        if value != value:  # noqa: PLR0124 - true of NaN alone
            return True
    return False


@njit
def _histogram(row: Any, best: Any, temperature: Any, mass: Any, count: Any) -> None:
    mass[:] = 0
    count[:] = 0
    for value in row:
        distance = (best - value) / temperature
        if distance < np.float32(np.inf):
            place = min(int(distance / BIN_WIDTH), NUM_BINS - 1)
            mass[place] += math.exp(-distance)
            count[place] += 1


@njit
def _members(row: Any, best: Any, temperature: Any, place: Any, size: Any) -> Any:
    """The ids of one bin, by descending logit and ascending id."""
    ids = np.empty(size, dtype=np.int64)
    found = 0
    for i in range(row.size):
        distance = (best - row[i]) / temperature
        if distance < np.float32(np.inf) and min(int(distance / BIN_WIDTH), NUM_BINS - 1) == place:
            ids[found] = i
            found += 1
    return ids[np.argsort(-row[ids], kind="mergesort")]


@njit
def _cut(row: Any, best: Any, settings: Any, mass: Any, count: Any) -> Any:
    """The logit and the id of the last token that top-k and top-p keep; -inf: all."""
    temperature, top_k, top_p = settings[0], settings[1], settings[2]
    num_left, total = int(top_k) if top_k > 0 else row.size, 0.0
    place = 0
    # Top-k: whole bins while they fit, then the first tokens of the bin in which it ends.
    while place < NUM_BINS and count[place] <= num_left:
        num_left -= count[place]
        total += mass[place]
        place += 1
    last = place  # the bin that is kept in part (NUM_BINS: none)
    if last < NUM_BINS:
        ids = _members(row, best, temperature, last, count[last])
        for i in ids[:num_left]:
            total += math.exp(-(best - row[i]) / temperature)
        if num_left > 0:
            cut_logit, cut_id = row[ids[num_left - 1]], ids[num_left - 1]
        else:
            cut_logit, cut_id = np.float32(0), np.int64(-1)  # set below
    else:
        cut_logit, cut_id = np.float32(-np.inf), np.int64(row.size)
    if top_p >= 1 and (last == NUM_BINS or num_left > 0):
        return cut_logit, cut_id
    # Top-p: the same with mass in the place of counts, over what top-k keeps.
    wanted = total * min(top_p, np.float32(1))
    place, reached = 0, 0.0
    while place < last and reached + mass[place] < wanted:
        reached += mass[place]
        place += 1
    if place == last and (last == NUM_BINS or num_left == 0):
        place = _last_filled(count, last)
        reached -= mass[place]
    ids = _members(row, best, temperature, place, count[place])
    if place == last:
        ids = ids[:num_left]
    for i in ids:
        reached += math.exp(-(best - row[i]) / temperature)
        if reached >= wanted:
            return row[i], i
    return row[ids[-1]], ids[-1]


@njit
def _last_filled(count: Any, end: Any) -> Any:
    place = end - 1
    while count[place] == 0:
        place -= 1
    return place


@njit
def _is_kept(value: Any, token_id: Any, cut_logit: Any, cut_id: Any) -> Any:
    return value > cut_logit or (value == cut_logit and token_id <= cut_id)


@njit
def _pick(row: Any, best: Any, temperature: Any, cut_logit: Any, cut_id: Any, uniform: Any) -> Any:
    """The kept token at which the cumulative weight, in order of ids, passes `uniform` of the whole."""
    num_blocks = (row.size + BLOCK - 1) // BLOCK
    sums = np.zeros(num_blocks, dtype=np.float64)
    for b in range(num_blocks):
        for i in range(b * BLOCK, min(row.size, (b + 1) * BLOCK)):
            if _is_kept(row[i], i, cut_logit, cut_id):
                sums[b] += math.exp((row[i] - best) / temperature)
    left = sums.sum() * uniform
    b, last = 0, num_blocks - 1
    while last > 0 and sums[last] == 0:  # rounding must not carry the search past all weight
        last -= 1
    while b < last and left >= sums[b]:
        left -= sums[b]
        b += 1
    chosen = -1
    for i in range(b * BLOCK, min(row.size, (b + 1) * BLOCK)):
        if _is_kept(row[i], i, cut_logit, cut_id) and row[i] > np.float32(-np.inf):
            chosen = i
            left -= math.exp((row[i] - best) / temperature)
            if left < 0:
                break
    return chosen


@njit
def _draw_row(row: Any, settings: Any, token_ids: Any, cut_logits: Any, cut_ids: Any, is_valid: Any) -> None:
    """Draw one row; the outputs are views of its own entry."""
    best, place = _maximum(row)
    token_ids[0], cut_logits[0], cut_ids[0] = place, -np.inf, row.size
    is_valid[0] = np.isfinite(best)
    temperature = settings[0]
    if not np.isfinite(best) or temperature == 0:
        return
    cut_logit, cut_id = np.float32(-np.inf), np.int64(row.size)
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


@njit
def _draw_all(task: Any) -> None:
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


def _make_worker(digest: int, *, cache: bool) -> Any:
    @cfunc("void(voidptr)", cache=cache)
    def draw_worker(address: Any) -> None:
        if digest >= 0:
            _draw_all(task_at(address))

    return draw_worker


@functools.cache
def worker() -> Worker:
    """The compiled worker."""
    return compile_worker(_make_worker, __file__)
