"""The parts of a layer: norms, attention, MLPs, mixtures of experts, and their functions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from logprobe.engine.forward.config import Rule
    from logprobe.engine.forward.families import ExpertFacts, NormKind
    from logprobe.engine.forward.reference.settings import Settings
    from logprobe.engine.forward.reference.weights import Array, Weights


def norm(kind: NormKind, x: Array, weight: Array | None, bias: Array | None, epsilon: float) -> Array:
    """Return x / √(mean(x²) + epsilon) · weight + bias; LayerNorm first subtracts the mean from x.

    This is RMSNorm (Zhang and Sennrich 2019), Gemma's variant of it, or LayerNorm (Ba et al. 2016).

    Each row is normalized in groups of `len(weight)` numbers: a group is a whole row of hidden states, one
    head of queries or keys, or all heads. Without `weight`, whole rows are normalized.

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


def attend(query: Array, key: Array, value: Array, rule: Rule, sinks: Array | None = None) -> Array:
    """Return, for each query, the weighted mean of the visible values, (positions, heads, head size).

    This is causal attention (Vaswani et al. 2017). The weights are the softmax of the scores, scale · query ·
    key. With a soft cap, a score becomes cap · tanh(score / cap) (Gemma 2, 2024). Consecutive query heads
    share one head of keys and values (grouped-query attention, Ainslie et al. 2023).

    Args:
        query: (positions, heads, head size), after rotary embedding.
        key: (positions, key heads, head size), after rotary embedding.
        value: (positions, key heads, head size).
        rule: scale, window and soft cap of the layer.
        sinks: (heads,) scores that take part in the softmax but have no value (gpt-oss, 2025).
    """
    num_positions, num_heads, _ = query.shape
    heads_per_key = num_heads // key.shape[1]
    is_hidden = ~visible(num_positions, rule.window)
    attended = np.empty_like(query)
    for head in range(num_heads):
        shared = head // heads_per_key
        scores = rule.scale * (query[:, head] @ key[:, shared].T)  # (positions, positions)
        if rule.softcap is not None:
            scores = rule.softcap * np.tanh(scores / rule.softcap)
        scores[is_hidden] = -np.inf
        if sinks is not None:
            scores = np.column_stack((scores, np.full(num_positions, sinks[head])))
        attended[:, head] = softmax(scores)[:, :num_positions] @ value[:, shared]
    return attended


def visible(num_positions: int, window: int | None) -> NDArray[np.bool_]:
    """Return a (positions, positions) mask, True where the row's position sees the column's position.

    A position sees itself and earlier positions: `window` in total (Beltagy et al. 2020), or all if None.
    """
    distance = np.subtract.outer(np.arange(num_positions), np.arange(num_positions))
    return (distance >= 0) & (distance < (num_positions if window is None else window))


def mlp(settings: Settings, layer: Weights, gates: Sequence[str], down: str, x: Array) -> Array:
    """Return down(activation(gate(x)) · up(x)), or down(activation(gate(x))), (positions, hidden size).

    The first form is a gated MLP (GLU variants, Shazeer 2020).

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
    """Return activation(gate) · up, where `outputs` (positions, 2 · width) is gate, then up.

    If the MLP is not gated, return activation(outputs).
    """
    activation = ACTIVATIONS[settings.activation]
    if not settings.family.is_gated:
        return activation(outputs)
    gate, up = np.split(outputs, 2, axis=-1)
    return activation(gate) * up


def mixture(settings: Settings, layer: Weights, facts: ExpertFacts, x: Array) -> Array:
    """Return the weighted sum of the selected experts' outputs, (positions, hidden size).

    This is a mixture of experts (Shazeer et al. 2017). For each position, the experts with the largest router
    probabilities are selected. Their probabilities are the weights in the sum; some families first divide the
    selected probabilities by their sum.
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


def softmax(x: Array) -> Array:
    """Return exp(x) / Σ exp(x) over the last axis; entries of -inf get 0."""
    weights: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), computed with tanh, which does not overflow."""
    return 0.5 * (1 + np.tanh(x / 2))


def silu(x: Array) -> Array:
    """Return x · sigmoid(x) (Elfwing et al. 2017)."""
    return x * sigmoid(x)


def gelu(x: Array) -> Array:
    """Return x · Φ(x), where Φ is the standard normal CDF (Hendrycks and Gimpel 2016)."""
    erf: Array = np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))
    return 0.5 * x * (1 + erf)


def gelu_tanh(x: Array) -> Array:
    """Return the tanh approximation of `gelu`, from the same paper."""
    tanh: Array = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + tanh)


def relu(x: Array) -> Array:
    """Return max(x, 0)."""
    return np.maximum(x, 0)


def relu2(x: Array) -> Array:
    """Return max(x, 0)² (So et al. 2021)."""
    return relu(x) ** 2


# By the names in `families.ACTIVATIONS`
ACTIVATIONS: Final[dict[str, Callable[[Array], Array]]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
}
