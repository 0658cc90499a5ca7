"""Sampling on a GPU, in Triton: one program per row; only the results are copied to the host.

Rows with truncation (top-k, top-p, min-p) are not supported. Sums are computed in float64, block by block in
order of token ids, so a row's result does not depend on other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import triton
import triton.language as tl

from logprobe.kernels.draw.params import Drawn
from logprobe.kernels.extraction.triton import aligned

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.draw.params import DrawParams

BLOCK: Final = 2048


def draw_rows(logits: Tensor, params: DrawParams) -> Drawn:
    """Sample one token per row from (B, V) float32 logits on a GPU, without truncation."""
    logits = aligned(logits)
    device = logits.device
    temperatures, uniforms = (
        torch.from_numpy(column).to(device, torch.float64)
        for column in (params.temperatures, params.uniforms)
    )
    found = torch.empty(2, len(logits), dtype=torch.int32, device=device)
    _draw_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        logits.shape[1],
        temperatures,
        uniforms,
        found,
        found[1],
        block=BLOCK,
        num_warps=8,
    )
    token_ids, is_valid = found.cpu().numpy()
    nothing_cut = np.full(len(logits), -np.inf, np.float32), np.full(len(logits), logits.shape[1], np.int32)
    return Drawn(token_ids, *nothing_cut, is_valid != 0)


@triton.jit
def _weights(values: tl.tensor, greatest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    return tl.exp((values.to(tl.float64) - greatest.to(tl.float64)) / temperature)


@triton.jit
def _draw_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    temperatures: tl.tensor,
    uniforms: tl.tensor,
    token_ids: tl.tensor,
    valid: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    greatest = tl.full([], float("-inf"), tl.float32)
    token_id = tl.full([], 0, tl.int32)
    num_nans = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, block):
        ids = start + tl.arange(0, block)
        values = tl.load(base + ids, mask=ids < vocab_size, other=float("-inf"))
        num_nans += tl.sum((values != values).to(tl.int32))  # noqa: PLR0124 (NaN is not)
        highest = tl.max(values)
        first = tl.min(tl.where(values == highest, ids, vocab_size))
        token_id = tl.where(highest > greatest, first, token_id).to(tl.int32)
        greatest = tl.maximum(greatest, highest)
    is_valid = (num_nans == 0) & (greatest > float("-inf")) & (greatest < float("inf"))
    if is_valid and temperature > 0:
        total = tl.full([], 0.0, tl.float64)
        for start in range(0, vocab_size, block):
            ids = start + tl.arange(0, block)
            values = tl.load(base + ids, mask=ids < vocab_size, other=float("-inf"))
            total += tl.sum(_weights(values, greatest, temperature))
        target = total * tl.load(uniforms + row)
        before = tl.full([], 0.0, tl.float64)
        hit_before = tl.full([], 0.0, tl.float64)
        hit = tl.full([], 0, tl.int32)  # last block whose cumulative sum starts at or below the target
        for start in range(0, vocab_size, block):
            ids = start + tl.arange(0, block)
            values = tl.load(base + ids, mask=ids < vocab_size, other=float("-inf"))
            own = tl.sum(_weights(values, greatest, temperature))
            is_hit = (before <= target) & (own > 0)
            hit = tl.where(is_hit, start, hit).to(tl.int32)
            hit_before = tl.where(is_hit, before, hit_before)
            before += own
        ids = hit + tl.arange(0, block)
        values = tl.load(base + ids, mask=ids < vocab_size, other=float("-inf"))
        weights = _weights(values, greatest, temperature)
        sums = hit_before + tl.cumsum(weights)
        last = tl.max(tl.where(weights > 0, ids, 0))
        first_beyond = tl.min(tl.where((sums > target) & (weights > 0), ids, vocab_size))
        token_id = tl.minimum(first_beyond, last).to(tl.int32)
    tl.store(token_ids + row, token_id)
    tl.store(valid + row, is_valid.to(tl.int32))
