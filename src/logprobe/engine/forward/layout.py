"""What was chosen for a model at load, read off the model as it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from logprobe.engine.layers.fused import FusedLayer
from logprobe.engine.protocol import Layout

if TYPE_CHECKING:
    from logprobe.config import Weights
    from logprobe.engine.forward.proof import Proof


def layout_of(decoder: nn.Module, weights: Weights, proof: Proof) -> Layout:
    """Describe a decoder as it stands."""
    num_layers = len(proof.step.windows)
    layers = [
        layer
        for module in decoder.modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
        for layer in module
    ]
    own = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, FusedLayer)})
    return Layout(
        weights=weights,
        num_layers=num_layers,
        num_fused=sum(isinstance(layer, FusedLayer) for layer in layers),
        own_layers=tuple(own),
        rope_boundary=proof.rope_boundary,
        probe_difference=proof.largest_difference,
    )
