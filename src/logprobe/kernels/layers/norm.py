"""Root-mean-square normalisation of rows (CPU): one pass of one kernel in the place of six operators.

Before it: hidden states inside the model. After it: the next layer's linear products.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from logprobe.kernels.threads.parallel import Stage, compiled_worker, float32_at, next_item
from logprobe.kernels.threads.vectors import F32, SUMS

if TYPE_CHECKING:
    from torch import Tensor

(X, WEIGHT, OUT, WIDTH, NUM_ROWS, EPSILON) = range(2, 8)
BLOCK_ROWS = 16
ROWS_FOR_THREADS = 64  # below, starting the threads costs more than they save


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Give `x / sqrt(mean(x²) + epsilon) · weight` over the last dimension (Zhang & Sennrich 2019).

    Args:
        x: (..., width) float32 on the CPU.
        weight: (width,) float32.
        epsilon: added to the mean square.
    """
    x = x.contiguous()
    out = x.new_empty(x.shape)
    num_rows = x.numel() // x.shape[-1]
    norm_stage(x, weight, out, epsilon).run(num_threads=1 if num_rows < ROWS_FOR_THREADS else None)
    return out


def norm_stage(x: Tensor, weight: Tensor, out: Tensor, epsilon: float) -> Stage:
    """`rms_norm` of contiguous rows into `out`, ready to run."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    settings = np.array([epsilon], dtype=np.float32)
    context = [x.data_ptr(), weight.data_ptr(), out.data_ptr(), width, num_rows, settings.ctypes.data]
    blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    return Stage(worker(), context, blocks, (x, weight, out, settings))


@njit(fastmath=SUMS)
def _sum_of_squares(x: Any) -> Any:
    total = F32(0)
    for i in range(x.size):
        total += x[i] * x[i]
    return total


@njit
def _scale(x: Any, factor: Any, weight: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = x[i] * factor * weight[i]


@compiled_worker()
def worker(task: Any) -> None:
    """Blocks of BLOCK_ROWS rows."""
    width, num_rows = task[WIDTH], task[NUM_ROWS]
    weight, epsilon = float32_at(task[WEIGHT], width), float32_at(task[EPSILON], 1)[0]
    item = next_item(task)
    while item >= 0:
        for row in range(item * BLOCK_ROWS, min(num_rows, (item + 1) * BLOCK_ROWS)):
            x = float32_at(task[X] + 4 * width * row, width)
            factor = F32(1 / math.sqrt(_sum_of_squares(x) / F32(width) + epsilon))
            _scale(x, factor, weight, float32_at(task[OUT] + 4 * width * row, width))
        item = next_item(task)
