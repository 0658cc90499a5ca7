"""The 8-bit matrix product and the passes around it (CPU): rows → int8 with a scale each, int32 → float32.

Each row of activations has its own scale, so that no row's result depends on its neighbours.
Before it: hidden states. After it: the next layer.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from llvmlite import binding as llvm
from numba import njit

from logprobe.kernels import hooks
from logprobe.kernels.layers import activations
from logprobe.kernels.layers.activations import gated_silu
from logprobe.kernels.threads.intrinsics import float_bits, maximum
from logprobe.kernels.threads.parallel import (
    compiled_worker,
    float32_at,
    int8_at,
    int32_at,
    next_item,
    parallel_for,
)
from logprobe.kernels.threads.vectors import F32, I32

if TYPE_CHECKING:
    from torch import Tensor

(IN, SCALES, OUT, WIDTH, NUM_ROWS, PASS, COLUMNS) = range(2, 9)  # WIDTH of IN; COLUMNS: a factor each
QUANTISE, SCALE, SCALE_AND_GATE, GATE = range(4)
LIMIT = F32(127)
ROUND = F32(12582912.0)  # 1.5 · 2**23: adding it leaves the nearest integer in the low bits
BLOCK_ROWS = 8
VALUES_FOR_THREADS = 1 << 16  # below, starting the threads costs more than they save
PIECE: Final = (
    1 << 10
)  # products summed in float32: 127² times as many are below 2**24, so that each sum is exact
_features = llvm.get_host_cpu_features()
_is_x86 = platform.machine() in {"x86_64", "AMD64"}
HAS_INT8_INSTRUCTIONS: Final = not _is_x86 or any(map(_features.get, ("avx512vnni", "avxvnni")))
_int_product = hooks.INT8_PRODUCT.find()


def products(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows · weightᵀ`, (M, K) and (N, K) int8 in [-127, 127] → (M, N) int32, exact.

    torch goes through the integers one by one where the processor has no instructions for their products
    (x86 before VNNI): there float32 gives the same integers at its own pace.
    """
    is_column = rows.shape[1] == 1  # torch 2.13 leaves what was in memory, where it has the instructions
    if _int_product is None or not HAS_INT8_INSTRUCTIONS or is_column:
        return float_products(rows, weight)
    # The transposed view: at one row, oneDNN is several times as fast as on the transposed copy.
    return cast("Tensor", _int_product(rows, weight.t()))


def float_products(rows: Tensor, weight: Tensor) -> Tensor:
    """`products` by float32, in pieces whose sums it holds."""
    out = torch.zeros(len(rows), len(weight), dtype=torch.int32)
    for first in range(0, rows.shape[1], PIECE):
        some = rows[:, first : first + PIECE].float()
        for begin in range(0, len(weight), PIECE):
            outputs = slice(begin, begin + PIECE)
            out[:, outputs] += (some @ weight[outputs, first : first + PIECE].float().t()).int()
    return out


def quantise_rows(x: Tensor, column_factors: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of `x · column_factors` to int8.

    Args:
        x: (M, K) float32.
        column_factors: (K,) float32.

    Returns:
        (M, K) int8 and scales (M,) float32 with x · column_factors ≈ scale · int8.
    """
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.int8)
    scales = torch.empty(len(x))
    _run(
        [
            x.data_ptr(),
            scales.data_ptr(),
            out.data_ptr(),
            x.shape[1],
            len(x),
            QUANTISE,
            column_factors.data_ptr(),
        ]
    )
    return out, scales


def scale_products(
    products: Tensor, row_scales: Tensor, column_scales: Tensor, *, is_gated: bool = False
) -> Tensor:
    """Give `products · row_scales · column_scales`, (M, N), as float32; gated, (M, N / 2), by its halves."""
    num_rows, width = products.shape
    out = torch.empty(num_rows, width // 2 if is_gated else width)
    kind = SCALE_AND_GATE if is_gated else SCALE
    context = [products.data_ptr(), row_scales.data_ptr(), out.data_ptr(), width, num_rows, kind]
    _run([*context, column_scales.data_ptr()])
    return out


def gate(x: Tensor) -> Tensor:
    """Give silu(g) · u for rows of gates g and then values u: (M, N) float32 → (M, N / 2)."""
    x = x.contiguous()
    num_rows, width = x.shape
    out = torch.empty(num_rows, width // 2)
    _run([x.data_ptr(), 0, out.data_ptr(), width, num_rows, GATE, 0])
    return out


def _run(context: list[int]) -> None:
    width, num_rows = context[3], context[4]
    blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    parallel_for(worker(), context, blocks, num_threads=1 if width * num_rows < VALUES_FOR_THREADS else None)


@njit(fastmath={"reassoc", "nsz", "nnan", "ninf"})
def _largest(x: Any, factors: Any) -> Any:
    largest = F32(0)
    for i in range(x.size):
        largest = maximum(largest, abs(x[i] * factors[i]))
    return largest


@njit
def round_row(x: Any, factors: Any, out: Any) -> Any:
    """Round a row times its factors to int8 in `out`; the scale that takes them back."""
    largest = _largest(x, factors)
    inverse = LIMIT / largest if largest > 0 else F32(0)
    for i in range(x.size):
        out[i] = float_bits(x[i] * factors[i] * inverse + ROUND) & I32(0xFF)
    return largest / LIMIT


@njit
def _scale(x: Any, row_scale: Any, column_scales: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = F32(x[i]) * (row_scale * column_scales[i])


@njit(error_model="numpy")  # a check for a divisor of zero would keep the loop from its vectors
def _scale_and_gate(x: Any, y: Any, row_scale: Any, x_scales: Any, y_scales: Any, out: Any) -> None:
    for i in range(out.size):
        g = F32(x[i]) * (row_scale * x_scales[i])
        out[i] = gated_silu(g, F32(y[i]) * (row_scale * y_scales[i]))


@njit(error_model="numpy")
def _gate(x: Any, y: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = gated_silu(x[i], y[i])


@njit
def _convert_row(task: Any, row: Any) -> None:
    width, kind, half = task[WIDTH], task[PASS], task[WIDTH] // 2
    values = task[IN] + 4 * width * row
    out = float32_at(task[OUT] + 4 * half * row, half)  # where halves meet
    if kind == GATE:
        _gate(float32_at(values, half), float32_at(values + 4 * half, half), out)
        return
    columns, scales = float32_at(task[COLUMNS], width), float32_at(task[SCALES], task[NUM_ROWS])
    if kind == QUANTISE:
        scales[row] = round_row(float32_at(values, width), columns, int8_at(task[OUT] + width * row, width))
    elif kind == SCALE:
        _scale(int32_at(values, width), scales[row], columns, float32_at(task[OUT] + 4 * width * row, width))
    else:
        gates, others = int32_at(values, half), int32_at(values + 4 * half, half)
        _scale_and_gate(gates, others, scales[row], columns[:half], columns[half:], out)


@compiled_worker(activations)
def worker(task: Any) -> None:
    """Blocks of BLOCK_ROWS rows, by the pass that is asked for."""
    item = next_item(task)
    while item >= 0:
        for row in range(item * BLOCK_ROWS, min(task[NUM_ROWS], (item + 1) * BLOCK_ROWS)):
            _convert_row(task, row)
        item = next_item(task)
