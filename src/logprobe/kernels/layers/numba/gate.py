"""The loops of `layers.gate`."""

from __future__ import annotations

from typing import Any

from logprobe.kernels.layers.gate import PIECE
from logprobe.kernels.layers.numba.activations import gate
from logprobe.kernels.processor import FLOAT
from logprobe.kernels.threads.numba.tasks import float32_at, next_item
from logprobe.kernels.threads.numba.workers import compiled_worker

# What a task's numbers mean, after the two of `parallel_for`: addresses, strides in float32, sizes.
(GATES, GATES_STRIDE, VALUES, VALUES_STRIDE, OUT, OUT_STRIDE, WIDTH, ACTIVATION) = range(2, 10)


@compiled_worker
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
            for place in range(count):
                out[place] = gates[place]
        gate(out, values, task[ACTIVATION])
        item = next_item(task)
