"""Gated activation of an MLP as a separate kernel (CPU).

This kernel is used if LoRA products must first be added to gates or values, or if the weight formats of gates
and values differ. Otherwise the kernel for matrix products applies the activation (`panels.Finish`). Both run
the same code and give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.kernels.stages import Stage

if TYPE_CHECKING:
    from logprobe.kernels.arrays import Array

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4, "relu2": 5}  # as in the kernel
PIECE = 1024  # elements of a row per work item


def gate_stage(gates: Array, values: Array | None, out: Array, activation: str) -> Stage:
    """Return the stage that writes activation(gates) · values, or activation(gates), to `out`.

    Args:
        gates: (M, width) float32, each row contiguous.
        values: (M, width) float32, each row contiguous; must not overlap `out`. None: write
            activation(gates).
        out: (M, width) float32, each row contiguous; may be `gates` itself.
        activation: one of ACTIVATIONS except "none".
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
