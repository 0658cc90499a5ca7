"""Products of activations with weights on tensor cores, accurate to float32.

Activations are passed as bfloat16 pieces (`pieces`). Weights keep the format of the checkpoint, so a step
reads no more bytes than the checkpoint has. A bfloat16 weight is one piece; float16, float32 and quantized
weights (`blocks`) are split in registers, into two pieces or three. Tensor cores round their float32 sums
toward zero, so they only sum the products of BLOCK_INPUTS inputs; ordinary float32 additions add these
partial sums.

A matrix with few outputs is also split along its inputs (split-K), so that all multiprocessors have work.
With few rows, each split runs as a separate program, and the kernel that uses the product adds the results
(`sum_parts`); with many rows, one program computes all splits. The number of splits depends only on the shape
of the matrix. So the order of all sums, and hence the bits of a row, is the same in any batch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from logprobe.kernels.triton import launch
from logprobe.kernels.triton.blocks import BlockWeight
from logprobe.kernels.triton.launch import wait_for_inputs
from logprobe.kernels.triton.pieces import multiply

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_INPUTS: Final = 64
WEIGHT_PIECES: Final = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
ENOUGH_TILES: Final = 128  # about one per multiprocessor of an H100
MAX_SPLITS: Final = 8
MIN_SPLIT_STEPS: Final = 4  # minimum length of a split, in steps of BLOCK_INPUTS inputs
SUM_BLOCK: Final = 1024


def linear(x: Tensor, weight: Tensor | BlockWeight, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, (rows, outputs) float32.

    Args:
        x: (num_pieces, rows, inputs) bfloat16, contiguous: the pieces of float32 activations.
        weight: (outputs, inputs) bfloat16, float16 or float32, contiguous; or quantized.
        bias: (outputs,) float32.
    """
    parts = linear_parts(x, weight)
    if len(parts) == 1 and bias is None:
        return parts[0]
    _, num_rows, num_outputs = parts.shape
    out = parts.new_empty(num_rows, num_outputs)
    if num_rows:
        _sum_kernel[(num_rows, triton.cdiv(num_outputs, SUM_BLOCK))](
            parts,
            out if bias is None else bias,
            out,
            num_outputs,
            num_rows * num_outputs,
            has_bias=bias is not None,
            num_parts=len(parts),
            block=SUM_BLOCK,
            **launch.options(x.device),
        )
    return out


def linear_parts(x: Tensor, weight: Tensor | BlockWeight) -> Tensor:
    """Return parts of `x @ weight.T`, (parts, rows, outputs) float32; added in order, they are the product.

    Args:
        x: (num_pieces, rows, inputs) bfloat16, contiguous: the pieces of float32 activations.
        weight: (outputs, inputs) bfloat16, float16 or float32, contiguous; or quantized.
    """
    num_pieces, num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    splits = num_splits(num_outputs, num_inputs)
    tile = _tile(num_rows, num_outputs)
    blocks = weight if isinstance(weight, BlockWeight) else None
    numbers = weight if isinstance(weight, torch.Tensor) else weight.values
    if x.is_cuda:
        tile["num_stages"] = _num_stages(tile, numbers.element_size(), num_pieces, x.device)
    grid = (triton.cdiv(num_rows, tile["block_rows"]), triton.cdiv(num_outputs, tile["block_outputs"]))
    is_split = splits > 1 and grid[0] * grid[1] < 2 * ENOUGH_TILES
    num_parts = splits if is_split else 1
    parts = torch.empty(num_parts, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    if num_rows:
        _linear_kernel[(*grid, num_parts)](
            x,
            numbers,
            numbers if blocks is None else blocks.header,
            parts,
            num_rows,
            num_outputs,
            num_inputs,
            num_rows * num_inputs,
            triton.cdiv(triton.cdiv(num_inputs, BLOCK_INPUTS), splits),
            num_pieces=num_pieces,
            weight_pieces=3 if blocks is not None else WEIGHT_PIECES[numbers.dtype],
            block=0 if blocks is None else blocks.block,
            is_int4=blocks is not None and blocks.is_int4,
            has_summands=blocks is not None and blocks.header.shape[2] == 2,
            is_whole=num_inputs % BLOCK_INPUTS == 0 and num_outputs % tile["block_outputs"] == 0,
            is_split=is_split,
            has_splits=splits > 1,
            block_inputs=BLOCK_INPUTS,
            enable_fp_fusion=False,  # a quantized weight is rounded as in a float32 matrix
            **tile,
            **launch.options(x.device),
        )
    return parts


def narrowed(weight: Tensor) -> Tensor:
    """Return a matrix in the first dtype of WEIGHT_PIECES that represents all its numbers exactly."""
    wide = weight.float()
    narrow = (weight.to(dtype) for dtype in WEIGHT_PIECES)
    return next((part for part in narrow if torch.equal(part.float(), wide)), weight)


def num_splits(num_outputs: int, num_inputs: int) -> int:
    """Return into how many parts a matrix of this shape is split along its inputs (split-K)."""
    splits, tiles, steps = 1, triton.cdiv(num_outputs, 64), triton.cdiv(num_inputs, BLOCK_INPUTS)
    while splits < MAX_SPLITS and tiles * splits <= ENOUGH_TILES and steps >= 2 * splits * MIN_SPLIT_STEPS:
        splits *= 2
    return splits


def _tile(num_rows: int, num_outputs: int) -> dict[str, int]:
    """Return the launch parameters of a tile by name; none of them affects the order of sums."""
    block_rows = max(16, triton.next_power_of_2(num_rows))
    if block_rows <= 32:
        return {
            "block_rows": block_rows,
            "block_outputs": 64,
            "num_warps": 4,
            "num_stages": 6 if block_rows == 16 else 4,
        }
    row_tiles = triton.cdiv(num_rows, 64)
    if row_tiles * triton.cdiv(num_outputs, 256) >= ENOUGH_TILES // 2:
        return {"block_rows": 64, "block_outputs": 256, "num_warps": 8, "num_stages": 3}
    if block_rows == 64:
        is_wide = triton.cdiv(num_outputs, 128) >= ENOUGH_TILES
        return {
            "block_rows": 64,
            "block_outputs": 128 if is_wide else 64,
            "num_warps": 4,
            "num_stages": 4,
        }
    return {"block_rows": 128, "block_outputs": 128, "num_warps": 8, "num_stages": 3}


def _num_stages(tile: dict[str, int], item_bytes: int, num_pieces: int, device: torch.device) -> int:
    """Return the number of pipeline stages: `tile["num_stages"]`, or fewer if shared memory is too small."""
    rows_bytes = 2 * num_pieces * tile["block_rows"]
    stage_bytes = BLOCK_INPUTS * (item_bytes * tile["block_outputs"] + rows_bytes)
    return max(1, min(tile["num_stages"], _shared_bytes(device) // stage_bytes))


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@triton.jit
def sum_parts(
    parts: tl.tensor, part_stride: tl.tensor, offsets: tl.tensor, mask: tl.tensor, num_parts: tl.constexpr
) -> tl.tensor:
    """Return a product's values at `offsets`: its parts (`linear_parts`), added in order."""
    total = tl.load(parts + offsets, mask=mask, other=0.0)
    for number in tl.static_range(1, num_parts):
        total += tl.load(parts + number * tl.cast(part_stride, tl.int64) + offsets, mask=mask, other=0.0)
    return total


@triton.jit
def _sum_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_outputs: tl.tensor,
    part_stride: tl.tensor,
    has_bias: tl.constexpr,
    num_parts: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    wait_for_inputs(is_early)
    outputs = tl.program_id(1) * block + tl.arange(0, block)
    mask = outputs < num_outputs
    offsets = tl.program_id(0).to(tl.int64) * num_outputs + outputs
    total = sum_parts(parts, part_stride, offsets, mask, num_parts)
    if has_bias:
        total += tl.load(bias + outputs, mask=mask, other=0.0)
    tl.store(out + offsets, total, mask=mask)


@triton.jit
def _dequantised(
    values: tl.tensor, header: tl.tensor, outputs: tl.tensor, start: tl.tensor, is_output: tl.tensor,
    num_inputs: tl.tensor, block: tl.constexpr, is_int4: tl.constexpr, has_summands: tl.constexpr,
    block_inputs: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return quantized weights (`blocks.BlockWeight`) as float32, (outputs, inputs)."""
    rows = outputs[:, None].to(tl.int64)
    inputs = start + tl.arange(0, block_inputs)
    mask = is_output[:, None] & (inputs < num_inputs)[None, :]
    if is_int4:
        half: tl.constexpr = block_inputs // 2
        twos = start // 2 + tl.arange(0, half)
        byte_mask = is_output[:, None] & (2 * twos < num_inputs)[None, :]
        packed = tl.load(values + rows * (num_inputs // 2) + twos[None, :], mask=byte_mask, other=0)
        numbers = tl.interleave(packed & 15, packed >> 4)
    else:
        numbers = tl.load(values + rows * num_inputs + inputs[None, :], mask=mask, other=0)
    num_parts: tl.constexpr = 2 if has_summands else 1
    places = header + (rows * (num_inputs // block) + (inputs // block)[None, :]) * num_parts
    weights = numbers.to(tl.float32) * tl.load(places, mask=mask, other=0.0).to(tl.float32)
    if has_summands:
        weights += tl.load(places + 1, mask=mask, other=0.0).to(tl.float32)
    return weights


@triton.jit
def _linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    header: tl.tensor,
    parts: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    piece_stride: tl.tensor,
    split_steps: tl.tensor,
    num_pieces: tl.constexpr,
    weight_pieces: tl.constexpr,
    block: tl.constexpr,
    is_int4: tl.constexpr,
    has_summands: tl.constexpr,
    is_whole: tl.constexpr,
    is_split: tl.constexpr,
    has_splits: tl.constexpr,
    block_inputs: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    wait_for_inputs(is_early)
    # The tile is (outputs, rows): tensor cores take 64 outputs at a time, and rows from 8 up.
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    outputs = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    inputs = tl.arange(0, block_inputs)
    is_row = rows < num_rows
    is_output = outputs < num_outputs
    first_input = 0
    end = num_inputs
    if is_split:
        first_input = tl.program_id(2) * split_steps * block_inputs
        end = tl.minimum(first_input + split_steps * block_inputs, num_inputs)
    x_places = x + rows[None, :].to(tl.int64) * num_inputs + inputs[:, None]
    weight_places = weight + outputs[:, None].to(tl.int64) * num_inputs + inputs[None, :]
    second_piece = x_places + tl.cast(piece_stride, tl.int64)
    third_piece = second_piece + tl.cast(piece_stride, tl.int64)
    total = tl.zeros([block_outputs, block_rows], tl.float32)
    split = tl.zeros([block_outputs, block_rows], tl.float32)
    for start in range(first_input, end, block_inputs):
        if block > 0:
            weights = _dequantised(
                weight,
                header,
                outputs,
                start,
                is_output,
                num_inputs,
                block,
                is_int4,
                has_summands,
                block_inputs,
            )
            x_mask = is_row[None, :] & (start + inputs < num_inputs)[:, None]
        elif is_whole:
            weights = tl.load(weight_places + start)
            x_mask = is_row[None, :]
        else:
            is_input = start + inputs < num_inputs
            weights = tl.load(weight_places + start, mask=is_output[:, None] & is_input[None, :], other=0.0)
            x_mask = is_row[None, :] & is_input[:, None]
        part = tl.zeros([block_outputs, block_rows], tl.float32)
        # The smallest products first. Those below the last bit of the largest are left out.
        first = tl.load(x_places + start, mask=x_mask, other=0.0)
        if num_pieces == 3:
            second = tl.load(second_piece + start, mask=x_mask, other=0.0)
            third = tl.load(third_piece + start, mask=x_mask, other=0.0)
        high = weights.to(tl.bfloat16)
        if weight_pieces > 1:
            left = weights.to(tl.float32) - high.to(tl.float32)
            middle = left.to(tl.bfloat16)
            if weight_pieces == 3:
                low = (left - middle.to(tl.float32)).to(tl.bfloat16)
                part = multiply(low, first, part)
            if num_pieces == 3:
                part = multiply(middle, second, part)
        if num_pieces == 3:
            part = multiply(high, third, part)
        if weight_pieces > 1:
            part = multiply(middle, first, part)
        if num_pieces == 3:
            part = multiply(high, second, part)
        split += multiply(high, first, part)
        if has_splits and not is_split:  # noqa: SIM102 - the first is known when the kernel is compiled
            if (start // block_inputs + 1) % split_steps == 0:
                total += split
                split = tl.zeros([block_outputs, block_rows], tl.float32)
    places = rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    target = parts
    if is_split:
        target += tl.program_id(2).to(tl.int64) * num_rows * num_outputs
    tl.store(target + places, tl.trans(total + split), mask=is_row[:, None] & is_output[None, :])
