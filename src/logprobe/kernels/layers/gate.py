"""Gates of feed-forward parts by themselves (CPU): for where more is added to both before they meet.

Before it: products that LoRA weights were added to. After it: the product down. The loops are those of the
panels' own finish, and so are the bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.kernels.stages import Stage

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4, "relu2": 5}  # what gates know
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
    return Stage(
        "gate",
        "GateArgs",
        num_items=num_rows * -(-width // PIECE),
        gates=gates,
        values=values,
        out=out,
        width=width,
        piece=PIECE,
        activation=ACTIVATIONS[activation],
    )
