"""The extraction on a GPU, in Triton: one program a row, one pass over its logits, no (B, V) temporary.

The best k of a row stay in registers and are merged with those of each block that holds a better one. For
k beyond MAX_TOP a few rows at a time are sorted by torch.
Through Triton's interpreter the same code runs, slowly, on the CPU; its speed on a GPU has not been measured.

Before it: checked requests. After it: output rows on the device, filled in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.extraction.api import RowRequests
    from logprobe.records.rows import DeviceRows, GivenLogprobs

BLOCK = 1024
MAX_TOP = 512  # power of two, at most BLOCK
SORT_BYTES = 32 * 2**20  # of logits sorted at once
NOTHING = tl.constexpr(-(2**63))  # below every packed pair
LOW_BITS = tl.constexpr(2**31 - 1)


def fill(logits: Tensor, requests: RowRequests, output: DeviceRows) -> None:
    """Writes what `requests` ask of `logits` (B, V) into `output`, on the device of the logits."""
    logits = logits.detach()
    if len(logits) == 0:
        return
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    requests = requests.to(logits.device)
    top = triton.next_power_of_2(requests.width - 1) if requests.width > 1 else 0
    _rows_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        requests.vocab_size,
        requests.chosen_ids,
        requests.num_logprobs,
        output.token_ids,
        output.logprobs,
        output.token_ids.stride(0),
        output.ranks,
        output.lse,
        output.is_valid,
        output.lse if output.entropy is None else output.entropy,
        output.extras.get("varentropy", output.lse),
        output.extras.get("margin", output.lse),
        has_entropy=output.entropy is not None,
        has_varentropy="varentropy" in output.extras,
        has_margin="margin" in output.extras,
        top=top if top <= MAX_TOP else 0,
        block=BLOCK,
    )
    if top > MAX_TOP:
        _sort_rows(logits, output)
    if output.given is not None:
        _fill_given(logits, output.given, output.lse)


def _sort_rows(logits: Tensor, output: DeviceRows) -> None:
    step = max(1, SORT_BYTES // (4 * logits.shape[1]))
    num = output.token_ids.shape[1] - 1
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        values, ids = logits[rows].float().sort(dim=1, descending=True, stable=True)
        is_valid = output.is_valid[rows, None]
        output.token_ids[rows, 1:] = ids[:, :num] * is_valid
        output.logprobs[rows, 1:] = values[:, :num] - output.lse[rows, None]


def _fill_given(logits: Tensor, given: GivenLogprobs, lse: Tensor) -> None:
    first, last = int(given.offsets[0]), int(given.offsets[-1])
    if last > first:
        rows = torch.arange(len(logits), device=logits.device)
        entry_rows = rows.repeat_interleave(given.offsets.diff())
        _given_kernel[(last - first,)](
            logits,
            logits.stride(0),
            logits.shape[1],
            entry_rows,
            given.token_ids[first:last],
            lse,
            given.logprobs[first:last],
            given.ranks[first:last],
            block=BLOCK,
        )


@triton.jit
def _pack(values: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """(value, id) as one int64 that is greater for a greater value, and for a lower id among equals."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    ascending = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ascending << 32) | (LOW_BITS - ids.to(tl.int64))


@triton.jit
def _absorb(values: tl.tensor, greatest: tl.tensor, total: tl.tensor, products: tl.tensor) -> tl.tensor:
    """Greatest value, sum of e**d and sum of d * e**d (d = value - greatest) with one more block."""
    highest = tl.maximum(greatest, tl.max(values))
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    d = tl.where(values == float("-inf"), -1e4, values - reference)  # a NaN stays
    e = tl.exp(d)
    shift = tl.where(greatest == float("-inf"), 0.0, greatest - reference).to(tl.float64)
    products = (products + shift * total) * tl.exp(shift) + tl.sum(d * e).to(tl.float64)
    return highest, total * tl.exp(shift) + tl.sum(e).to(tl.float64), products


@triton.jit
def _squares(values: tl.tensor, greatest: tl.tensor, mean: tl.tensor) -> tl.tensor:
    """Sum of (d - mean)**2 * e**d, d = value - greatest."""
    d = tl.where(values == float("-inf"), -1e4, values - greatest)
    return tl.sum((d - mean) * (d - mean) * tl.exp(d))


@triton.jit
def _second(values: tl.tensor, greatest: tl.tensor, second: tl.tensor) -> tl.tensor:
    """The second largest of the values before and of one more block; equal values are two."""
    highest = tl.max(values)
    is_highest = values == highest
    others = tl.max(tl.where(is_highest, float("-inf"), values))
    next_one = tl.where(tl.sum(is_highest.to(tl.int32)) > 1, highest, others)
    return tl.maximum(tl.minimum(highest, greatest), tl.maximum(next_one, second))


@triton.jit
def _rows_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    chosen_ids: tl.tensor,
    num_logprobs: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    width: tl.tensor,
    ranks: tl.tensor,
    lses: tl.tensor,
    valid: tl.tensor,
    entropies: tl.tensor,
    varentropies: tl.tensor,
    margins: tl.tensor,
    has_entropy: tl.constexpr,
    has_varentropy: tl.constexpr,
    has_margin: tl.constexpr,
    top: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    chosen_id = tl.load(chosen_ids + row)
    chosen = tl.load(base + chosen_id).to(tl.float32)
    greatest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float64)
    products = tl.full([], 0.0, tl.float64)
    count = tl.full([], 0, tl.int32)
    second = tl.full([], float("-inf"), tl.float32)
    if top > 0:
        best = tl.full([top], NOTHING, tl.int64)
    for start in range(0, vocab_size, block):
        ids = start + tl.arange(0, block)
        values = tl.load(base + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        count += tl.sum((values > chosen).to(tl.int32))
        if has_margin:
            second = _second(values, greatest, second)
        greatest, total, products = _absorb(values, greatest, total, products)
        if top > 0:
            pairs = tl.where(ids < vocab_size, _pack(values, ids), NOTHING)
            if tl.max(pairs) > tl.min(best):
                best = tl.topk(tl.reshape(tl.join(best, tl.topk(pairs, top)), [2 * top]), top)
    is_number = total == total  # noqa: PLR0124 (NaN is not)
    is_valid = is_number & (greatest > float("-inf")) & (greatest < float("inf"))
    lse = tl.where(is_valid, greatest.to(tl.float64) + tl.log(total), float("nan"))
    tl.store(valid + row, is_valid)
    tl.store(ranks + row, tl.where(is_valid, count + 1, 0))
    tl.store(lses + row, lse.to(tl.float32))
    if has_entropy:
        entropy = tl.where(is_valid, tl.log(total) - products / total, float("nan"))
        tl.store(entropies + row, entropy.to(tl.float32))
    if has_varentropy:
        mean = (products / total).to(tl.float32)
        squares = tl.full([], 0.0, tl.float64)
        for start in range(0, vocab_size, block):
            ids = start + tl.arange(0, block)
            values = tl.load(base + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
            squares += _squares(values, greatest, mean).to(tl.float64)
        varentropy = tl.where(is_valid, squares / total, float("nan"))
        tl.store(varentropies + row, varentropy.to(tl.float32))
    if has_margin:
        tl.store(margins + row, tl.where(is_valid, greatest - second, float("nan")))
    tl.store(token_ids + row * width, chosen_id)
    tl.store(logprobs + row * width, (chosen - lse).to(tl.float32))
    if top > 0:
        columns = tl.arange(0, top)
        wanted = columns < tl.load(num_logprobs + row)
        top_ids = tl.where(is_valid, tl.where(wanted, LOW_BITS - (best & LOW_BITS), 0), 0)
        places = row * width + 1 + columns
        tl.store(token_ids + places, top_ids.to(tl.int32), mask=wanted)
        tl.store(
            logprobs + places, (tl.load(base + top_ids).to(tl.float32) - lse).to(tl.float32), mask=wanted
        )


@triton.jit
def _given_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    entry_rows: tl.tensor,
    token_ids: tl.tensor,
    lses: tl.tensor,
    logprobs: tl.tensor,
    ranks: tl.tensor,
    block: tl.constexpr,
) -> None:
    entry = tl.program_id(0)
    row = tl.load(entry_rows + entry)
    base = logits + row * row_stride
    lse = tl.load(lses + row)
    own = tl.load(base + tl.load(token_ids + entry)).to(tl.float32)
    count = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, block):
        ids = start + tl.arange(0, block)
        values = tl.load(base + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        count += tl.sum((values > own).to(tl.int32))
    tl.store(logprobs + entry, own - lse)
    tl.store(ranks + entry, tl.where(lse == lse, count + 1, 0))  # noqa: PLR0124
