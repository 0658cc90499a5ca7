"""Softmax, and the activation functions of MLPs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.engine.forward.reference.weights import Array


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
    """Return x · Φ(x), where Φ is the normal distribution function (Hendrycks and Gimpel 2016)."""
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
