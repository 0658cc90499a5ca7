"""Extraction on an NVIDIA GPU, in Triton: one read of the logits, no (B, V) temporary for k <= 128.

A split is a range of SPLIT token ids; a part is a range of PART token ids.

1. `_split_kernel` runs one program per row and split. It computes the sums over the split, and the maximum of
   each part.
2. `_merge_kernel` runs one program per row. It merges the sums of the splits.
3. `_top_kernel` runs one program per row. The k ranges of ids with the greatest maxima contain the k greatest
   logits, so the kernel searches ever smaller ranges (LEVELS has their lengths in parts), and at last single
   logits. For k > 128, torch sorts whole rows of packed (value, id) pairs.
4. `_given_kernel` runs one program per row and split. For each given id it counts the greater logits.

SPLIT is fixed, the sums do not depend on k, and nothing is summed across rows, so a row has the same bits
alone and in any batch. Triton's interpreter runs the same code on the CPU, slowly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from logprobe.kernels.extraction.device import copy_to

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.extraction.requests import RowRequests

SPLIT = 2048
PART = 16
LEVELS = (32, 4)  # parts in a range, and in a smaller one within it
TOPS = {32: 4, 128: 8}  # variants of `_top_kernel`: largest k -> warps of a program
MAX_RANGES = 2**14  # as many as `_top_kernel` can sort in registers
MAX_TORCH_TOPK = 4096  # for a larger k, torch.topk is slower than torch.sort of the whole row
PAIRS_BYTES = 128 * 2**20  # maximum size of the pairs that torch sorts at once
NOTHING = tl.constexpr(-(2**63))  # below every packed pair
LOW_BITS = tl.constexpr(2**31 - 1)


def fill(logits: Tensor, requests: RowRequests, output: Any) -> None:
    """Compute what `requests` ask for from (B, V) logits, and write it to `output`, `DeviceRows` of tensors.

    All tensors are on one device, but the requests may be on the host. The host waits for the device only
    if the requests are on the device and have given ids. Without those, a CUDA graph can capture this call.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    logits = aligned(logits.detach())
    chosen_ids = copy_to(requests.chosen_ids, logits.device)
    num_splits = triton.cdiv(vocab_size, SPLIT)
    sums = logits.new_empty((num_rows, 6, num_splits), dtype=torch.float32)
    maxima = logits.new_empty((num_rows, num_splits * SPLIT // PART), dtype=torch.float32)
    lses = logits.new_empty(num_rows, dtype=torch.float64)
    rows = (logits, logits.stride(0), vocab_size)
    grid = (num_rows, num_splits)
    moments = {
        "has_varentropy": "varentropy" in output.extras,
        "has_margin": "margin" in output.extras,
    }
    _split_kernel[grid](
        *rows, chosen_ids, sums, maxima, has_maxima=requests.width > 1, part=PART, split=SPLIT, **moments
    )
    _merge_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        chosen_ids,
        sums,
        num_splits,
        output.token_ids,
        output.logprobs,
        output.token_ids.stride(0),
        output.ranks,
        lses,
        output.lse,
        output.is_valid,
        output.lse if output.entropy is None else output.entropy,
        output.extras.get("varentropy", output.lse),
        output.extras.get("margin", output.lse),
        has_entropy=output.entropy is not None,
        **moments,
        splits=triton.next_power_of_2(num_splits),
    )
    if requests.width > 1:
        _fill_top(logits, requests.width - 1, maxima, lses, output)
    if output.given is not None and requests.given_offsets is not None:
        first, last = requests.given_offsets[[0, -1]].tolist()  # on the host
        output.given.ranks[first:last].zero_()
        given = output.given
        _given_kernel[grid](
            *rows, lses, given.offsets, given.token_ids, given.logprobs, given.ranks, split=SPLIT
        )


def aligned(logits: Tensor) -> Tensor:
    """Return the logits with the alignment of a contiguous tensor, copied if necessary.

    With another alignment, Triton would load single values instead of vectors, and sums would differ.
    """
    is_aligned = logits.stride(0) % 16 == 0 and logits.data_ptr() % 16 == 0
    if logits.stride(1) == 1 and is_aligned == (logits.shape[1] % 16 == 0):
        return logits
    return logits.clone(memory_format=torch.contiguous_format)


def _fill_top(logits: Tensor, num_top: int, maxima: Tensor, lses: Tensor, output: Any) -> None:
    vocab_size = logits.shape[1]
    for top, num_warps in TOPS.items():
        num_ranges = max(triton.next_power_of_2(triton.cdiv(vocab_size, PART * LEVELS[0])), top)
        if num_top <= top and num_ranges <= MAX_RANGES:
            _top_kernel[(len(logits),)](
                logits,
                logits.stride(0),
                vocab_size,
                maxima,
                maxima.stride(0),
                output.num_logprobs,
                lses,
                output.token_ids,
                output.logprobs,
                output.token_ids.stride(0),
                top=top,
                part=PART,
                large=LEVELS[0],
                small=LEVELS[1],
                num_ranges=num_ranges,
                num_warps=num_warps,
            )
            return
    step = max(1, PAIRS_BYTES // (8 * vocab_size))
    for start in range(0, len(logits), step):
        _sort_rows(
            logits[start : start + step],
            num_top,
            lses[start : start + step],
            output.rows(start, start + step),
        )


def _sort_rows(logits: Tensor, num_top: int, lses: Tensor, output: Any) -> None:
    num_rows, vocab_size = logits.shape
    pairs = logits.new_empty((num_rows, vocab_size), dtype=torch.int64)
    grid = (num_rows, triton.cdiv(vocab_size, SPLIT))
    _pack_kernel[grid](logits, logits.stride(0), vocab_size, pairs, split=SPLIT)
    if num_top <= MAX_TORCH_TOPK:
        best = pairs.topk(num_top, dim=1).values
    else:
        best = pairs.sort(dim=1, descending=True).values[:, :num_top]
    ids = (LOW_BITS.value - (best & LOW_BITS.value)) * output.is_valid[:, None]
    output.token_ids[:, 1:] = ids
    output.logprobs[:, 1:] = logits.gather(1, ids).double() - lses[:, None]


@triton.jit
def _pack(values: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Pack (value, id) into an int64 that is greater for a greater value or, among equals, a lower id."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    ascending = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ascending << 32) | (LOW_BITS - ids.to(tl.int64))


@triton.jit
def _second(values: tl.tensor, highest: tl.tensor, seconds: tl.tensor) -> tl.tensor:
    """Return the second largest number in a row, from the two largest numbers in each part of the row.

    `values` has the largest of each part, `seconds` the second largest, and `highest` is the largest of all.
    If the largest occurs twice, it is also the second largest.
    """
    is_highest = values == highest
    others = tl.max(tl.where(is_highest, seconds, values))
    return tl.where(tl.sum(is_highest.to(tl.int32)) > 1, highest, others)


@triton.jit
def _split_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    chosen_ids: tl.tensor,
    sums: tl.tensor,
    maxima: tl.tensor,
    has_varentropy: tl.constexpr,
    has_margin: tl.constexpr,
    has_maxima: tl.constexpr,
    part: tl.constexpr,
    split: tl.constexpr,
) -> None:
    """Compute the results of one split of a row.

    These are the largest and the second largest value; with d = value - largest, the sums of e**d, d * e**d
    and (d - mean)**2 * e**d; and the number of values above the chosen token's.
    """
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    num_splits = tl.num_programs(1)
    base = logits + row * row_stride
    chosen = tl.load(base + tl.load(chosen_ids + row)).to(tl.float32)
    ids = number * split + tl.arange(0, split)
    values = tl.load(base + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    highest = tl.max(values)
    d = values - tl.where(highest == float("-inf"), 0.0, highest)
    d = tl.where(d < -1e4, -1e4, d)  # also for -inf; NaN stays NaN
    e = tl.exp(d)
    total = tl.sum(e)
    products = tl.sum(d * e)
    place = sums + row * 6 * num_splits + number
    tl.store(place, highest)
    tl.store(place + num_splits, total)
    tl.store(place + 2 * num_splits, products)
    if has_varentropy:
        mean = products / tl.where(total == 0.0, 1.0, total)
        tl.store(place + 3 * num_splits, tl.sum((d - mean) * (d - mean) * e))
    if has_margin:
        tl.store(place + 4 * num_splits, _second(values, highest, float("-inf")))
    tl.store(place + 5 * num_splits, tl.sum((values > chosen).to(tl.int32)).to(tl.float32))  # exact
    if has_maxima:
        num: tl.constexpr = split // part
        places = (row * num_splits + number) * num + tl.arange(0, num)
        tl.store(maxima + places, tl.max(tl.reshape(values, [num, part]), axis=1))


@triton.jit
def _merge_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    chosen_ids: tl.tensor,
    sums: tl.tensor,
    num_splits: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    width: tl.tensor,
    ranks: tl.tensor,
    exact_lses: tl.tensor,
    lses: tl.tensor,
    valid: tl.tensor,
    entropies: tl.tensor,
    varentropies: tl.tensor,
    margins: tl.tensor,
    has_entropy: tl.constexpr,
    has_varentropy: tl.constexpr,
    has_margin: tl.constexpr,
    splits: tl.constexpr,
) -> None:
    """Merge the sums of a row's splits in float64, and write the row's results."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, splits)
    mask = parts < num_splits
    place = sums + row * 6 * num_splits + parts
    highest = tl.load(place, mask=mask, other=float("-inf"))
    total = tl.load(place + num_splits, mask=mask, other=0.0).to(tl.float64)
    products = tl.load(place + 2 * num_splits, mask=mask, other=0.0).to(tl.float64)
    count = tl.sum(tl.load(place + 5 * num_splits, mask=mask, other=0.0).to(tl.int32))
    greatest = tl.max(highest)
    is_empty = total == 0.0
    shift = tl.where(is_empty, 0.0, highest.to(tl.float64) - greatest.to(tl.float64))
    scale = tl.exp(shift)
    means = shift + products / tl.where(is_empty, 1.0, total)
    mass = tl.sum(total * scale)
    mean = tl.sum(total * scale * means) / mass
    is_valid = (mass == mass) & (greatest > float("-inf")) & (greatest < float("inf"))  # noqa: PLR0124 (NaN)
    lse = tl.where(is_valid, greatest.to(tl.float64) + tl.log(mass), float("nan"))
    tl.store(valid + row, is_valid)
    tl.store(ranks + row, tl.where(is_valid, count + 1, 0))
    tl.store(exact_lses + row, lse)
    tl.store(lses + row, lse.to(tl.float32))
    if has_entropy:
        tl.store(entropies + row, tl.where(is_valid, tl.log(mass) - mean, float("nan")).to(tl.float32))
    if has_varentropy:
        squares = tl.load(place + 3 * num_splits, mask=mask, other=0.0).to(tl.float64)
        spread = tl.sum(scale * (squares + total * (means - mean) * (means - mean))) / mass
        tl.store(varentropies + row, tl.where(is_valid, spread, float("nan")).to(tl.float32))
    if has_margin:
        seconds = tl.load(place + 4 * num_splits, mask=mask, other=float("-inf"))
        margin = greatest - _second(highest, greatest, seconds)
        tl.store(margins + row, tl.where(is_valid, margin, float("nan")))
    chosen_id = tl.load(chosen_ids + row)
    chosen = tl.load(logits + row * row_stride + chosen_id).to(tl.float32)
    tl.store(token_ids + row * width, chosen_id)
    tl.store(logprobs + row * width, (chosen - lse).to(tl.float32))


@triton.jit
def _best_ranges(
    maxima: tl.tensor, firsts: tl.tensor, length: tl.constexpr, num_parts: tl.tensor, top: tl.constexpr
) -> tl.tensor:
    """Return the first part of each of the `top` ranges (`length` parts long) with the greatest maxima.

    A number of `num_parts` or more means that there is no such range.
    """
    places = firsts[:, None] + tl.arange(0, length)[None, :]
    heads = tl.load(maxima + places, mask=places < num_parts, other=float("-inf"))
    pairs = tl.where(firsts < num_parts, _pack(tl.max(heads, axis=1), firsts), NOTHING)
    best = tl.topk(pairs, top)
    return tl.where(best == NOTHING, num_parts, LOW_BITS - (best & LOW_BITS)).to(tl.int32)


@triton.jit
def _within(firsts: tl.tensor, length: tl.constexpr, smaller: tl.constexpr) -> tl.tensor:
    """Return the first parts of the ranges of `smaller` parts within ranges of `length` parts."""
    num: tl.constexpr = length // smaller
    return tl.reshape(firsts[:, None] + tl.arange(0, num)[None, :] * smaller, [firsts.shape[0] * num])


@triton.jit
def _top_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    maxima: tl.tensor,
    maxima_stride: tl.tensor,
    num_logprobs: tl.tensor,
    lses: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    width: tl.tensor,
    top: tl.constexpr,
    part: tl.constexpr,
    large: tl.constexpr,
    small: tl.constexpr,
    num_ranges: tl.constexpr,
) -> None:
    """Write the largest logits of a row."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    heads = maxima + row * maxima_stride
    num_parts = tl.cdiv(vocab_size, part)
    firsts = _best_ranges(heads, tl.arange(0, num_ranges) * large, large, num_parts, top)
    firsts = _best_ranges(heads, _within(firsts, large, small), small, num_parts, top)
    firsts = _best_ranges(heads, _within(firsts, small, 1), 1, num_parts, top)
    ids = tl.reshape(firsts[:, None] * part + tl.arange(0, part)[None, :], [top * part])
    values = tl.load(base + ids, mask=ids < vocab_size, other=0.0).to(tl.float32)
    best = tl.topk(tl.where(ids < vocab_size, _pack(values, ids), NOTHING), top)
    lse = tl.load(lses + row)
    columns = tl.arange(0, top)
    mask = columns < tl.load(num_logprobs + row)
    top_ids = tl.where(mask, LOW_BITS - (best & LOW_BITS), 0)
    top_ids = tl.where(lse == lse, top_ids, 0)  # noqa: PLR0124 (NaN: the row is not valid)
    places = row * width + 1 + columns
    tl.store(token_ids + places, top_ids.to(tl.int32), mask=mask)
    own = tl.load(base + top_ids).to(tl.float32)
    tl.store(logprobs + places, (own - lse).to(tl.float32), mask=mask)


@triton.jit
def _pack_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    pairs: tl.tensor,
    split: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * split + tl.arange(0, split)
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=0.0).to(tl.float32)
    tl.store(pairs + row * vocab_size + ids, _pack(values, ids), mask=ids < vocab_size)


@triton.jit
def _given_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    lses: tl.tensor,
    offsets: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    ranks: tl.tensor,
    split: tl.constexpr,
) -> None:
    """Add this split's counts of greater logits to the given ids' ranks, which are initially 0.

    Programs add in any order, which does not change integer sums.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    base = logits + row * row_stride
    first = tl.load(offsets + row)
    last = tl.load(offsets + row + 1)
    lse = tl.load(lses + row)
    is_valid = (lse == lse).to(tl.int32)  # noqa: PLR0124 (NaN)
    ids = part * split + tl.arange(0, split)
    end = tl.where(first < last, vocab_size, 0)  # read nothing if there are no given ids
    values = tl.load(base + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
    one = (part == 0).to(tl.int32)  # a rank is 1 + the count
    stored = tl.where(part == 0, last, first)  # only the first program stores the log-probabilities
    for start in range(first, last, 8):
        entries = start + tl.arange(0, 8)
        mask = entries < last
        own = tl.load(base + tl.load(token_ids + entries, mask=mask, other=0)).to(tl.float32)
        counts = tl.sum((values[None, :] > own[:, None]).to(tl.int32), axis=1) + one
        tl.atomic_add(ranks + entries, counts * is_valid, mask=mask, sem="relaxed")
        tl.store(logprobs + entries, (own - lse).to(tl.float32), mask=entries < stored)
