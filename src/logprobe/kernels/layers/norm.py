"""Normalisation of rows by their root mean square or about their mean (CPU): one kernel for six operators.

Before it: hidden states inside the model. After it: the next layer's linear products.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.threads.intrinsics import FLOAT, internal
from logprobe.kernels.threads.parallel import Stage, block_rows, compiled_worker, float32_at, next_item
from logprobe.kernels.threads.vectors import F32, SUMS

if TYPE_CHECKING:
    from torch import Tensor

# What a task's numbers mean, after the two of `parallel_for`: addresses, strides in float32, sizes.
(X, X_STRIDE, WEIGHT, BIAS, OUT, OUT_STRIDE, RESIDUAL) = range(2, 9)
(WIDTH, PARTS, NUM_ROWS, EPSILON, IS_CENTRED, BLOCK_ROWS) = range(9, 15)
MOST_ROWS = 16  # of an item
ROWS_FOR_THREADS = 64  # below, starting the threads costs more than they save


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Give `x / sqrt(mean(x²) + epsilon) · weight` over the last dimension (Zhang & Sennrich 2019).

    Args:
        x: (..., width) float32 on the CPU.
        weight: (width,) float32.
        epsilon: added to the mean square.
    """
    rows = x.contiguous().view(-1, x.shape[-1])
    out = rows.new_empty(rows.shape)
    norm_stage(rows, weight, out, epsilon).run()
    return out.view(x.shape)


def norm_stage(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    epsilon: float,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    is_centred: bool = False,
) -> Stage:
    """`rms_norm` or, centred, LayerNorm (Ba et al. 2016) of each part of some rows into `out`, ready to run.

    Args:
        x: (num_rows, parts · width) float32, each row contiguous.
        weight: (width,) float32.
        out: of x's shape, each row contiguous; it may be x.
        epsilon: added to the mean square, or to the variance.
        residual: added to the result, laid out as `out`, which it may be.
        bias: (width,) float32, added after the weight of a centred row.
        is_centred: the mean is taken off first.
    """
    width, num_rows = len(weight), len(x)
    parts = x.shape[1] // width
    assert residual is None or residual.stride() == out.stride()
    assert bias is None or is_centred
    settings = np.array([epsilon], dtype=np.float32)
    block = block_rows(num_rows, MOST_ROWS)
    context = [
        x.data_ptr(), x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), out.stride(0), 0 if residual is None else residual.data_ptr(),
        width, parts, num_rows, settings.ctypes.data, is_centred, block,
    ]  # fmt: skip
    keeps = (x, weight, out, settings, residual, bias)
    return Stage(worker(), context, -(-num_rows // block), keeps, is_small=num_rows < ROWS_FOR_THREADS)


@internal(fastmath=SUMS)
def _sum_of_squares(x: Any) -> Any:
    total = F32(0)
    for i in range(x.size):
        total += x[i] * x[i]
    return total


@internal
def _scale(x: Any, factor: Any, weight: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = x[i] * factor * weight[i]


@internal
def _scale_and_add(x: Any, factor: Any, weight: Any, residual: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = residual[i] + x[i] * factor * weight[i]


@internal
def _place_part(task: Any, place: Any, out_place: Any, weight: Any, epsilon: Any) -> None:
    width = weight.size
    x, out = float32_at(task[X] + place, width), float32_at(task[OUT] + out_place, width)
    factor = F32(1 / math.sqrt(_sum_of_squares(x) / F32(width) + epsilon))
    if task[RESIDUAL] == 0:
        _scale(x, factor, weight, out)
    else:
        _scale_and_add(x, factor, weight, float32_at(task[RESIDUAL] + out_place, width), out)


@internal(fastmath=SUMS)
def _sum(x: Any) -> Any:
    total = F32(0)
    for i in range(x.size):
        total += x[i]
    return total


@internal(fastmath=SUMS)
def _sum_of_squared_differences(x: Any, mean: Any) -> Any:
    total = F32(0)
    for i in range(x.size):
        total += (x[i] - mean) * (x[i] - mean)
    return total


@internal
def _centre_and_scale(x: Any, mean: Any, factor: Any, weight: Any, summands: Any, out: Any) -> None:
    bias, residual = summands
    for i in range(x.size):
        y = (x[i] - mean) * factor * weight[i]
        if bias.size > 0:
            y += bias[i]
        if residual.size > 0:
            y += residual[i]
        out[i] = y


@internal
def _place_centred_part(task: Any, place: Any, out_place: Any, weight: Any, epsilon: Any) -> None:
    width = weight.size
    x, out = float32_at(task[X] + place, width), float32_at(task[OUT] + out_place, width)
    mean = _sum(x) / F32(width)
    # A second pass: a sum of squares less the mean's square would lose the digits of a row far from zero.
    factor = F32(1 / math.sqrt(_sum_of_squared_differences(x, mean) / F32(width) + epsilon))
    bias = float32_at(task[BIAS], width if task[BIAS] != 0 else 0)
    residual = float32_at(task[RESIDUAL] + out_place, width if task[RESIDUAL] != 0 else 0)
    _centre_and_scale(x, mean, factor, weight, (bias, residual), out)


@compiled_worker()
def worker(task: Any) -> None:
    """Blocks of rows."""
    width, num_rows = task[WIDTH], task[NUM_ROWS]
    weight, epsilon = float32_at(task[WEIGHT], width), float32_at(task[EPSILON], 1)[0]
    item = next_item(task)
    while item >= 0:
        start = item * task[BLOCK_ROWS]
        for row in range(start, min(num_rows, start + task[BLOCK_ROWS])):
            for part in range(task[PARTS]):
                place, out_place = task[X_STRIDE] * row + width * part, task[OUT_STRIDE] * row + width * part
                if task[IS_CENTRED] != 0:
                    _place_centred_part(task, FLOAT * place, FLOAT * out_place, weight, epsilon)
                else:
                    _place_part(task, FLOAT * place, FLOAT * out_place, weight, epsilon)
        item = next_item(task)
