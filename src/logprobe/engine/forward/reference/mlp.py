"""The MLP of a layer: plain, or gated (GLU variants, Shazeer 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.engine.forward.reference.functions import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.forward.reference.settings import Settings
    from logprobe.engine.forward.reference.weights import Array, Weights


def mlp(settings: Settings, layer: Weights, gates: Sequence[str], down: str, x: Array) -> Array:
    """Return down(activation(gate(x)) · up(x)), or down(activation(gate(x))), (positions, hidden size).

    Args:
        settings: settings of the model.
        layer: weights of the layer.
        gates: names of the gate and up modules, or of one module that computes both, gate first.
        down: module of the projection back to the hidden size.
        x: (positions, hidden size).
    """
    outputs = np.concatenate([layer.linear(name, x) for name in gates], axis=-1)
    return layer.linear(down, inner(settings, outputs))


def inner(settings: Settings, outputs: Array) -> Array:
    """Return activation(gate) · up, where `outputs` is gate and up, (positions, 2 · width).

    Without gates, return activation(outputs).
    """
    activation = ACTIVATIONS[settings.activation]
    if not settings.family.is_gated:
        return activation(outputs)
    gate, up = np.split(outputs, 2, axis=-1)
    return activation(gate) * up
