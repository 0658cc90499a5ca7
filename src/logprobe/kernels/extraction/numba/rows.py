"""The loops of `extraction.cpu`: one pass over each row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from logprobe.kernels.extraction.numba.select import (
    NUM_COUNTS,
    collect,
    descending_key,
    kth_largest,
    num_before,
    sort_pairs,
    sort_row,
    top_ids,
)
from logprobe.kernels.threads.numba.intrinsics import BLOCK, LANES, block_maxima, internal, prefetch_block
from logprobe.kernels.threads.numba.tasks import (
    float32_at,
    int32_at,
    int64_at,
    next_item,
    uint8_at,
    uint16_at,
)
from logprobe.kernels.threads.numba.vectors import (
    F32,
    MINUS_INF,
    count_greater,
    sum_exp,
    sum_exp_and_product,
    sum_squares,
    widen_bfloat16,
    widen_float16,
)
from logprobe.kernels.threads.numba.workers import compiled_worker

MIN_GROUPS = 8  # in a block of values; the larger k, the more groups it takes to bound it
FEW_GIVEN = 4  # given ids up to which counting for each costs less than sorting the row's largest values
MANY_GIVEN = 128  # given ids from which sorting the row costs less than a counting pass for each

# What a task's numbers mean, after the two of `parallel_for`: addresses unless said otherwise.
(
    LOGITS,
    ROW_STRIDE,  # bytes
    VOCAB_SIZE,
    KIND,  # 0 float32, 1 float16, 2 bfloat16
    CHOSEN,
    NUM_LOGPROBS,
    TOKEN_IDS,
    LOGPROBS,
    WIDTH,  # columns of the two above
    RANKS,
    LSE,
    IS_VALID,
    ENTROPY,  # 0 where it was not asked for
    GIVEN_OFFSETS,  # 0 where none are given
    GIVEN_IDS,
    GIVEN_LOGPROBS,
    GIVEN_RANKS,
    VARENTROPY,  # 0 where it was not asked for
    MARGIN,  # 0 where it was not asked for
) = range(2, 21)


@compiled_worker
def worker(task: Any) -> None:
    """Rows, one after the other, until no thread has any left."""
    vocab_size = task[VOCAB_SIZE]
    wide = np.empty(vocab_size if task[KIND] else 1, np.float32)
    num_blocks = (vocab_size + BLOCK - 1) // BLOCK
    maxima = np.empty(num_blocks * LANES, np.float32)
    blocks = np.empty(num_blocks, np.float32)
    padded = np.empty(BLOCK + 2 * LANES, np.float32)
    pairs = np.empty((2, vocab_size), np.uint64)
    counts = np.empty(NUM_COUNTS, np.int64)
    item = next_item(task)
    while item >= 0:
        _row(task, item, _float_row(task, item, wide), ((maxima, blocks, padded), (pairs, counts)))
        item = next_item(task)


@internal
def _float_row(task: Any, item: Any, wide: Any) -> Any:
    address = task[LOGITS] + item * task[ROW_STRIDE]
    if task[KIND] == 0:
        return float32_at(address, task[VOCAB_SIZE])
    bits = uint16_at(address, task[VOCAB_SIZE])
    if task[KIND] == 1:
        widen_float16(bits, wide)
    else:
        widen_bfloat16(bits, wide)
    return wide


@internal(error_model="numpy")  # an invalid row divides by zero
def _row(task: Any, item: Any, row: Any, scratch: Any) -> None:
    (maxima, blocks, padded), (pairs, counts) = scratch
    chosen = int32_at(task[CHOSEN], item + 1)[item]
    k = np.int64(int32_at(task[NUM_LOGPROBS], item + 1)[item])
    num_groups = MIN_GROUPS
    while 2 * blocks.size * num_groups < 3 * k and num_groups < LANES:
        num_groups *= 2
    maxima = maxima[: blocks.size * num_groups]
    greatest, total, products, rank = _one_pass(
        row, (maxima, blocks, padded), row[chosen], task[ENTROPY] != 0 or task[VARENTROPY] != 0
    )
    is_valid = greatest > MINUS_INF and not math.isnan(total)
    lse = float(greatest) + math.log(total) if is_valid else math.nan
    uint8_at(task[IS_VALID], item + 1)[item] = is_valid
    int32_at(task[RANKS], item + 1)[item] = rank + 1 if is_valid else 0
    float32_at(task[LSE], item + 1)[item] = lse
    if task[ENTROPY]:
        entropy = math.log(total) - products / total
        float32_at(task[ENTROPY], item + 1)[item] = entropy if is_valid else math.nan
    if task[VARENTROPY]:
        squares = _squares(row, greatest, products / total) if is_valid else math.nan
        float32_at(task[VARENTROPY], item + 1)[item] = squares / total
    first, last = _given_range(task, item)
    ordered = pairs[0, :0]
    if is_valid and (3 * k > 2 * maxima.size or last - first > MANY_GIVEN):
        ordered = sort_row(row, pairs, counts)
    token_ids = int32_at(task[TOKEN_IDS] + 4 * item * task[WIDTH], k + 1)
    token_ids[0] = chosen
    token_ids[1:] = 0
    if is_valid:
        top_ids(row, (maxima, blocks), token_ids[1:], ordered, (pairs, counts))
    logprobs = float32_at(task[LOGPROBS] + 4 * item * task[WIDTH], k + 1)
    for column in range(k + 1):
        logprobs[column] = float(row[token_ids[column]]) - lse
    if task[MARGIN]:
        margin = _margin(row, (maxima, blocks), ordered, (pairs, counts)) if is_valid else math.nan
        float32_at(task[MARGIN], item + 1)[item] = margin
    if last > first:
        _given(task, (first, last), row, (maxima, blocks), ordered, (pairs, counts), lse)


@internal
def _one_pass(row: Any, groups: Any, chosen: Any, with_products: Any) -> Any:
    """Greatest value m, sums of e**d and d * e**d for d = x - m, how many exceed `chosen`; fills maxima."""
    maxima, blocks, padded = groups
    num_groups = maxima.size // blocks.size
    greatest, total, products, count = MINUS_INF, 0.0, 0.0, 0
    for block in range(blocks.size):
        values = row[block * BLOCK : min((block + 1) * BLOCK, row.size)]
        inside = maxima[block * num_groups : (block + 1) * num_groups]
        count += _group_maxima(values, inside, chosen, padded)
        blocks[block] = padded[BLOCK + 2 * (LANES - 1)]
        if blocks[block] > greatest:
            shift = float(greatest) - float(blocks[block]) if total > 0.0 else 0.0
            products = (products + shift * total) * math.exp(shift)
            total *= math.exp(shift)
            greatest = blocks[block]
        # while all is -inf there is nothing to add, but a NaN must stay
        reference, weight = (greatest, F32(1.0)) if greatest > MINUS_INF else (F32(0.0), F32(0.0))
        prefetch_block(values.ctypes.data + 4 * BLOCK)
        if with_products:
            part_total, part_products = sum_exp_and_product(values, reference)
            products += part_products * weight
        else:
            part_total = sum_exp(values, reference)
        total += part_total * weight
    return greatest, total, products, count


@internal
def _squares(row: Any, greatest: Any, mean: Any) -> Any:
    """Sum of (d - mean)**2 * e**d over the row, d = x - greatest.

    A pass of its own about the mean: E[d**2] - E[d]**2 of one pass would cancel, and the sums of rows that
    ask for no varentropy stay as they are.
    """
    squares = 0.0
    for start in range(0, row.size, BLOCK):
        squares += sum_squares(row[start : min(start + BLOCK, row.size)], greatest, F32(mean))
    return squares


@internal
def _margin(row: Any, groups: Any, ordered: Any, scratch: Any) -> Any:
    """How far the second largest value lies below the largest; inf where there is none."""
    if row.size < 2:
        return math.inf
    best = np.empty(2, np.int64)
    top_ids(row, groups, best, ordered, scratch)
    return float(row[best[0]]) - float(row[best[1]])


@internal
def _padded(values: Any, target: Any) -> Any:
    """A whole block: the last values of a row and -inf."""
    for place in range(values.size):  # assigned as a slice, sizes would be compared
        target[place] = values[place]
    for place in range(values.size, BLOCK):
        target[place] = MINUS_INF
    return target[:BLOCK]


@internal
def _group_maxima(values: Any, maxima: Any, chosen: Any, scratch: Any) -> Any:
    """Fills `maxima` with those of as many groups of values; returns how many values exceed `chosen`."""
    if values.size < BLOCK:
        values = _padded(values, scratch)
    levels = scratch[BLOCK:]
    count = block_maxima(values.ctypes.data, chosen, levels.ctypes.data)
    first = 2 * (LANES - maxima.size)
    for group in range(maxima.size):
        maxima[group] = levels[first + group]
    return count


@internal
def _given_range(task: Any, item: Any) -> Any:
    """The entries [first, last) of the given ids that are this row's."""
    if task[GIVEN_OFFSETS] == 0:
        return 0, 0
    offsets = int64_at(task[GIVEN_OFFSETS], item + 2)
    return offsets[item], offsets[item + 1]


@internal
def _given(task: Any, entries: Any, row: Any, groups: Any, ordered: Any, scratch: Any, lse: Any) -> None:
    """Logprobs and ranks of given ids: likely ones are found among the largest, which are sorted for them."""
    first, last = entries
    token_ids = int32_at(task[GIVEN_IDS], last)[first:]
    logprobs = float32_at(task[GIVEN_LOGPROBS], last)[first:]
    ranks = int32_at(task[GIVEN_RANKS], last)[first:]
    for entry in range(token_ids.size):
        logprobs[entry] = float(row[token_ids[entry]]) - lse
        ranks[entry] = 0
    if math.isnan(lse):
        return
    maxima, blocks = groups
    pairs, counts = scratch
    is_whole, bound = ordered.size > 0, F32(np.inf)
    if not is_whole and token_ids.size > FEW_GIVEN:
        bound = kth_largest(maxima, maxima.size - maxima.size // 16, counts)
        count = collect(row, blocks, bound, pairs[0], token_ids[:0])
        ordered = sort_pairs(pairs[0, :count], pairs[1, :count], counts)
    for entry in range(token_ids.size):
        value = row[token_ids[entry]]
        is_sorted = is_whole or value > bound
        ranks[entry] = 1 + (num_before(ordered, descending_key(value)) if is_sorted else 0)
    for block in range(0 if is_whole else blocks.size):
        values = row[block * BLOCK : min((block + 1) * BLOCK, row.size)]  # read for each while it is near
        for entry in range(token_ids.size):
            value = row[token_ids[entry]]
            if value <= bound and blocks[block] > value:
                ranks[entry] += count_greater(values, value)
