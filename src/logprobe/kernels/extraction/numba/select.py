"""The largest k of a row, descending, ties by ascending id: bounded by group maxima, so few are sorted.

The k-th largest of the maxima of k or more groups of values is a lower bound of the k-th largest value:
each of k groups holds a value that is at least as large. Only blocks whose maximum reaches the bound are
read again. Values equal to the bound are ties: the first k of them are enough, so a row that is masked
almost everywhere costs no more than another.

Before it: the row kernel with its maxima. After it: the output columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from logprobe.kernels.threads.numba.intrinsics import (
    BLOCK,
    LANES,
    bits_float,
    float_bits,
    internal,
    lowest_bit,
    reaching,
)
from logprobe.kernels.threads.numba.vectors import F32, I32

U32 = np.uint32
U64 = np.uint64
NUM_COUNTS = 1024  # of the scratch that sorting and selecting need
FEW = 48  # below it, insertion sorts faster than counting


@internal
def descending_key(value: Any) -> Any:
    """A uint32 that is smaller for a greater float, and equal for -0.0 and 0.0."""
    bits = float_bits(value + F32(0.0))  # -0.0 + 0.0 is 0.0
    ascending = bits ^ ((bits >> I32(31)) | I32(-2147483648))
    return ~U32(ascending)


@internal
def key_value(key: Any) -> Any:
    """The float of a descending key."""
    ascending = I32(~U32(key))
    return bits_float(ascending ^ (~(ascending >> I32(31)) | I32(-2147483648)))


@internal
def top_ids(row: Any, groups: Any, ids: Any, ordered: Any, scratch: Any) -> None:
    """Fills `ids` (k,) with the ids of the k largest values.

    `groups` is the greatest value of each group and of each block of the row; `ordered` the whole row's
    sorted pairs, or empty, and then there are at least k groups.
    """
    if ids.size == 0:
        return
    if ordered.size > 0:
        take_ids(ordered, ids)
        return
    maxima, blocks = groups
    pairs, counts = scratch
    bound = kth_largest(maxima, ids.size, counts)
    num_greater = collect(row, blocks, bound, pairs[0], ids)
    ordered = sort_pairs(pairs[0, :num_greater], pairs[1, :num_greater], counts)
    for column in range(ids.size - 1, num_greater - 1, -1):
        ids[column] = ids[column - num_greater]  # the ties, which come after
    take_ids(ordered, ids)


@internal
def take_ids(ordered: Any, ids: Any) -> None:
    """The ids of the first pairs, as many as there are places or pairs."""
    for column in range(min(ids.size, ordered.size)):
        ids[column] = ordered[column] & U64(0xFFFFFFFF)


@internal
def sort_row(row: Any, pairs: Any, counts: Any) -> Any:
    """The pairs of the whole row, sorted."""
    for index in range(row.size):
        pairs[0, index] = pack(row[index], index)
    return sort_pairs(pairs[0], pairs[1], counts)


@internal
def kth_largest(values: Any, k: Any, counts: Any) -> Any:
    """The k-th largest value, k counted from 1: four passes, each fixing eight bits of its key."""
    prefix, mask, wanted = U32(0), U32(0), k
    for shift in (24, 16, 8, 0):
        counts[:256] = 0
        for value in values:
            key = descending_key(value)
            if key & mask == prefix:
                counts[(key >> U32(shift)) & U32(255)] += 1
        digit = 0
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit += 1
        prefix |= U32(digit) << U32(shift)
        mask |= U32(255) << U32(shift)
    return key_value(prefix)


@internal
def collect(row: Any, blocks: Any, bound: Any, greater: Any, ties: Any) -> Any:
    """Fills `greater` with the pairs of all values above `bound`, `ties` with the first ids equal to it.

    Returns how many are greater.
    """
    num_greater, num_ties = 0, 0
    for block in range(blocks.size):
        if blocks[block] < bound or (blocks[block] == bound and num_ties == ties.size):
            continue
        stop = min((block + 1) * BLOCK, row.size)
        for start in range(block * BLOCK, stop, LANES):
            bits = _bits_at(row, start, stop, bound)
            while bits != U64(0):
                index = start + lowest_bit(bits)
                bits &= bits - U64(1)
                if row[index] > bound:
                    greater[num_greater] = pack(row[index], index)
                    num_greater += 1
                elif num_ties < ties.size:
                    ties[num_ties] = index
                    num_ties += 1
    return num_greater


@internal
def _bits_at(row: Any, start: Any, stop: Any, bound: Any) -> Any:
    """One bit for each of the values [start, start + 64) before `stop` that reach `bound`."""
    if start + LANES <= stop:
        return reaching(row.ctypes.data + 4 * start, bound)
    bits = U64(0)
    for index in range(start, stop):
        bits |= U64(row[index] >= bound) << U64(index - start)
    return bits


@internal
def pack(value: Any, index: Any) -> Any:
    """(descending key, id) in one uint64, which sorts as the pair does."""
    return (U64(descending_key(value)) << U64(32)) | U64(index)


@internal
def sort_pairs(pairs: Any, scratch: Any, counts: Any) -> Any:
    """Sorts pairs whose ids ascend; returns `pairs` or `scratch`, whichever holds the result."""
    if pairs.size > FEW:
        return _radix_sort(pairs, scratch, counts)
    for end in range(1, pairs.size):
        pair, place = pairs[end], end
        while place > 0 and pairs[place - 1] > pair:
            pairs[place] = pairs[place - 1]
            place -= 1
        pairs[place] = pair
    return pairs


@internal
def _radix_sort(pairs: Any, scratch: Any, counts: Any) -> Any:
    """Least digit first, eight bits of the key at a time; stable, so the ids need no pass of their own."""
    counts[:1024] = 0
    for pair in pairs:
        for digit in range(4):
            counts[256 * digit + ((pair >> U64(32 + 8 * digit)) & U64(255))] += 1
    for digit in range(4):
        places = counts[256 * digit : 256 * digit + 256]
        shift = U64(32 + 8 * digit)
        if places[(pairs[0] >> shift) & U64(255)] == pairs.size:
            continue  # all alike in this digit
        place = 0
        for value in range(256):
            place, places[value] = place + places[value], place
        for pair in pairs:
            value = (pair >> shift) & U64(255)
            scratch[places[value]] = pair
            places[value] += 1
        pairs, scratch = scratch, pairs
    return pairs


@internal
def num_before(pairs: Any, key: Any) -> Any:
    """How many of the sorted pairs have a smaller key, that is a strictly greater value."""
    low, high = 0, pairs.size
    while low < high:
        middle = (low + high) // 2
        if U32(pairs[middle] >> U64(32)) < key:
            low = middle + 1
        else:
            high = middle
    return low
