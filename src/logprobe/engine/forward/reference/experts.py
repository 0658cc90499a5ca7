"""Mixture of experts: a router selects a few MLPs for each position (Shazeer et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.engine.forward.reference.functions import sigmoid, softmax
from logprobe.engine.forward.reference.mlp import inner, mlp

if TYPE_CHECKING:
    from logprobe.engine.forward.families import ExpertFacts
    from logprobe.engine.forward.reference.settings import Settings
    from logprobe.engine.forward.reference.weights import Array, Weights


def mixture(settings: Settings, layer: Weights, facts: ExpertFacts, x: Array) -> Array:
    """Return the weighted sum of the selected experts' outputs, (positions, hidden size).

    For each position, the experts with the largest router probabilities are selected. Their probabilities are
    the weights in the sum; some families first divide the selected probabilities by their sum.
    """
    probabilities = softmax(layer.linear(facts.router, x))  # (positions, experts)
    chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, : settings.experts_per_token]
    shares = np.take_along_axis(probabilities, chosen, axis=-1)
    if settings.normalises_experts:
        shares /= shares.sum(axis=-1, keepdims=True)
    mixed = np.zeros_like(x)
    for expert in np.unique(chosen):
        rows, places = np.nonzero(chosen == expert)
        gates = layer.rows(facts.gates, int(expert))  # (2 · width, hidden size)
        down = layer.rows(facts.down, int(expert))  # (hidden size, width)
        outputs = inner(settings, x[rows] @ gates.T) @ down.T
        mixed[rows] += shares[rows, places, None] * outputs
    if facts.shared_gate is None:
        return mixed
    # Qwen2-MoE (2024): one more expert for all positions, weighted by a gate of its own
    shared = mlp(settings, layer, facts.shared, facts.shared_down, x)
    return mixed + sigmoid(layer.linear(facts.shared_gate, x)) * shared
