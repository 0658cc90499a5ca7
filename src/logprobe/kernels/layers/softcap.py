"""Soft cap of logits (Gemma 2), in one kernel (CPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.kernels.stages import Stage

if TYPE_CHECKING:
    from logprobe.kernels.arrays import Array

PIECE = 1 << 13  # elements of a row per work item


def softcap_stage(logits: Array, cap: float) -> Stage:
    """Return the stage that replaces `logits` by cap · tanh(logits / cap), in place.

    Args:
        logits: (num_rows, width) float32, each row contiguous.
        cap: the largest magnitude of a result.
    """
    num_rows, width = logits.shape
    return Stage(
        "softcap",
        "SoftcapArgs",
        num_items=num_rows * -(-width // PIECE),
        logits=logits,
        width=width,
        piece=PIECE,
        cap=cap,
    )
