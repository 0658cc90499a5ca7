"""Gates of feed-forward parts by themselves (CPU): for where more is added to both before they meet.

Before it: products that LoRA weights were added to. After it: the product down. The loops are those of the
panels' own finish, and so are the bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logprobe.kernels.layers import activations
from logprobe.kernels.layers.activations import ACTIVATIONS, gate
from logprobe.kernels.threads.intrinsics import FLOAT
from logprobe.kernels.threads.parallel import Stage, compiled_worker, float32_at, next_item

if TYPE_CHECKING:
    from torch import Tensor

# What a task's numbers mean, after the two of `parallel_for`: addresses, strides in float32, sizes.
(GATES, GATES_STRIDE, VALUES, VALUES_STRIDE, OUT, OUT_STRIDE, WIDTH, ACTIVATION) = range(2, 10)
PIECE = 1024  # numbers of a row that a thread takes at a time


def gate_stage(gates: Tensor, values: Tensor | None, out: Tensor, activation: str) -> Stage:
    """activation(gates) · values, or activation(gates) where there are no values, into `out`, ready to run.

    Args:
        gates: (M, width) float32, each row contiguous.
        values: of the gates' shape, each row contiguous; not where `out` is.
        out: of the gates' shape, each row contiguous; it may be the gates.
        activation: one of ACTIVATIONS but "none".
    """
    assert activation != "none"
    num_rows, width = gates.shape
    if values is None:
        values = gates.new_ones(1, width).expand(num_rows, width)
    context = [
        gates.data_ptr(), gates.stride(0), values.data_ptr(), values.stride(0), out.data_ptr(), out.stride(0),
        width, ACTIVATIONS[activation],
    ]  # fmt: skip
    return Stage(worker(), context, num_rows * -(-width // PIECE), (gates, values, out))


@compiled_worker(activations)
def worker(task: Any) -> None:
    """Pieces of rows."""
    width = task[WIDTH]
    pieces = -(-width // PIECE)
    item = next_item(task)
    while item >= 0:
        row, start = item // pieces, item % pieces * PIECE
        count = min(PIECE, width - start)
        gates = float32_at(task[GATES] + FLOAT * (task[GATES_STRIDE] * row + start), count)
        values = float32_at(task[VALUES] + FLOAT * (task[VALUES_STRIDE] * row + start), count)
        out = float32_at(task[OUT] + FLOAT * (task[OUT_STRIDE] * row + start), count)
        # Copied first, as loops in place become vectors; between two arrays that are one they would not.
        if task[OUT] != task[GATES]:
            out[:] = gates
        gate(out, values, task[ACTIVATION])
        item = next_item(task)
