"""RMSNorm (Zhang and Sennrich 2019), Gemma's variant of it, and LayerNorm (Ba et al. 2016)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from logprobe.engine.forward.families import NormKind
    from logprobe.engine.forward.reference.weights import Array


def norm(kind: NormKind, x: Array, weight: Array | None, bias: Array | None, epsilon: float) -> Array:
    """Return x / √(mean(x²) + epsilon) · weight + bias; LayerNorm first subtracts the mean from x.

    Each row is normed in groups of `len(weight)` numbers: a group is a whole row of hidden states, one head
    of queries or keys, or all heads. Without `weight`, whole rows are normed.

    Args:
        kind: `rms`, `rms from one` (the factor is weight + 1), or `layer`.
        x: (positions, width).
        weight: (group size,), or None for a factor of 1.
        bias: (group size,), or None.
        epsilon: added to the mean square, so that the root is not 0.
    """
    groups: Array = x.reshape(len(x), -1, x.shape[-1] if weight is None else len(weight))
    if kind == "layer":
        groups = groups - groups.mean(axis=-1, keepdims=True)
    groups = groups / np.sqrt((groups**2).mean(axis=-1, keepdims=True) + epsilon)
    if weight is not None:
        groups = groups * (weight + 1 if kind == "rms from one" else weight)
    if bias is not None:
        groups = groups + bias
    return groups.reshape(x.shape)
