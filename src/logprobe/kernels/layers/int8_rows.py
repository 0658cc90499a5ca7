"""A linear layer in 8 bits for a few rows (CPU): rounding, products and scales in one stage.

The integers are those of `quantise_rows` and `products`, and the scales are applied in the same order,
so that a row's numbers do not depend on which of the two forms it went through. At one row the weights'
way from memory is the time it takes. Before it: hidden states. After it: the next stage of a series.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from logprobe.kernels.layers import activations, int8
from logprobe.kernels.layers.activations import gated_silu
from logprobe.kernels.layers.int8 import round_row
from logprobe.kernels.threads.intrinsics import FLOAT, LANES, LINE, dot_blocks_int8, prefetch_line
from logprobe.kernels.threads.parallel import Stage, compiled_worker, float32_at, int8_at, next_item
from logprobe.kernels.threads.vectors import F32, I32

if TYPE_CHECKING:
    from torch import Tensor

# What a task's numbers mean, after the two of `parallel_for`: addresses, then sizes; no address is 0.
(IN, FACTORS, WEIGHT, SCALES, BIAS, RESIDUAL, OUT, NUM_ROWS, WIDTH, OUT_WIDTH, IS_GATED) = range(2, 13)
AHEAD = 2048  # bytes between the weights that are read and those that are fetched
BLOCK = 64  # outputs an item


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """A linear layer's weights in 8 bits."""

    values: Tensor  # (outputs, inputs) int8, contiguous
    scales: Tensor  # (outputs,) float32
    column_factors: Tensor  # (inputs,) float32: what inputs are multiplied by before they are rounded
    bias: Tensor | None  # (outputs,) float32


def int8_stage(
    x: Tensor, weights: Int8Weights, out: Tensor, *, residual: Tensor | None = None, is_gated: bool = False
) -> Stage:
    """`x` times the weights, plus bias and `residual`, into `out`; all rows contiguous.

    Args:
        x: (M, inputs) float32, few rows: every thread rounds all of them.
        weights: as `Int8Linear` holds them.
        out: (M, outputs) float32, or half as many outputs where gated; may be `residual` itself.
        residual: (M, outputs) float32.
        is_gated: the first half of the outputs are gates g of the second u: the result is silu(g) · u.
    """
    (num_rows, width), out_width = x.shape, out.shape[1]
    bias, scales = weights.bias, weights.scales
    context = [
        x.data_ptr(), weights.column_factors.data_ptr(), weights.values.data_ptr(), scales.data_ptr(),
        0 if bias is None else bias.data_ptr(), 0 if residual is None else residual.data_ptr(),
        out.data_ptr(), num_rows, width, out_width, int(is_gated),
    ]  # fmt: skip
    return Stage(worker(), context, (out_width + BLOCK - 1) // BLOCK, (x, weights, out, residual))


@njit
def _dot(x: Any, weight: Any, width: Any) -> Any:
    """The dot product of `width` int8 at two addresses."""
    num_blocks = width // LANES
    total, done = dot_blocks_int8(x, weight, num_blocks), LANES * num_blocks
    rest, factors = int8_at(x + done, width - done), int8_at(weight + done, width - done)
    for i in range(rest.size):
        total += I32(rest[i]) * I32(factors[i])
    return I32(total)


@njit
def _output(task: Any, x: Any, scale: Any, column: Any) -> Any:
    width = task[WIDTH]
    total = _dot(x, task[WEIGHT] + width * column, width)
    value = F32(total) * (scale * float32_at(task[SCALES] + FLOAT * column, 1)[0])
    if task[BIAS] != 0:
        value += float32_at(task[BIAS] + FLOAT * column, 1)[0]
    return value


@njit
def _fill(task: Any, x: Any, scale: Any, row: Any, column: Any) -> None:
    place = FLOAT * (task[OUT_WIDTH] * row + column)
    value = _output(task, x, scale, column)
    if task[IS_GATED] != 0:
        value = gated_silu(value, _output(task, x, scale, task[OUT_WIDTH] + column))
    if task[RESIDUAL] != 0:
        value += float32_at(task[RESIDUAL] + place, 1)[0]
    float32_at(task[OUT] + place, 1)[0] = value


@njit
def _fetch(weight: Any, width: Any) -> None:
    for place in range(0, width, LINE):
        prefetch_line(weight + AHEAD + place)


@compiled_worker(int8, activations)
def worker(task: Any) -> None:
    """Round the rows, every thread for itself, then blocks of BLOCK outputs."""
    num_rows, width = task[NUM_ROWS], task[WIDTH]
    factors = float32_at(task[FACTORS], width)
    rows, scales = np.empty((num_rows, width), np.int8), np.empty(num_rows, np.float32)
    for row in range(num_rows):
        x = float32_at(task[IN] + FLOAT * width * row, width)
        scales[row] = round_row(x, factors, rows[row])
    item = next_item(task)
    while item >= 0:
        for column in range(item * BLOCK, min(task[OUT_WIDTH], (item + 1) * BLOCK)):
            _fetch(task[WEIGHT] + width * column, width)
            if task[IS_GATED] != 0:
                _fetch(task[WEIGHT] + width * (task[OUT_WIDTH] + column), width)
            for row in range(num_rows):
                _fill(task, rows.ctypes.data + width * row, scales[row], row, column)
        item = next_item(task)
