"""Gates of feed-forward parts: an activation of the gate times the value beside it, one number at a time.

Written so that loops over them become vector instructions; their compiled callers are functions with
numpy's error model, since a check for a divisor of zero would keep the loop from its vectors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from logprobe.kernels.threads.numba.intrinsics import internal
from logprobe.kernels.threads.numba.vectors import F32, LOWEST, ONE, ZERO, exponential

GELU_SLOPE = F32(2 * math.sqrt(2 / math.pi))
GELU_CUBE = F32(0.044715)
ROOT_HALF = math.sqrt(0.5)


@internal(error_model="numpy")
def _sigmoid(x: Any) -> Any:
    d = -abs(x)
    e = exponential(LOWEST if d < LOWEST else d)  # noqa: FURB136 (this way round, NaN stays NaN)
    return (ONE if x >= 0 else e) / (ONE + e)


@internal(error_model="numpy")
def gated_silu(g: Any, u: Any) -> Any:
    """silu(g) · u (Shazeer 2020)."""
    return g * _sigmoid(g) * u


@internal(error_model="numpy")
def gated_gelu_tanh(g: Any, u: Any) -> Any:
    """gelu(g) · u by the tangent's formula (Hendrycks & Gimpel 2016): (1 + tanh z) / 2 is sigmoid(2 z)."""
    return g * _sigmoid(GELU_SLOPE * (g + GELU_CUBE * g * g * g)) * u


@internal(error_model="numpy")
def gated_gelu(g: Any, u: Any) -> Any:
    """gelu(g) · u, exact."""
    return F32(np.float64(g) * 0.5 * (1.0 + math.erf(np.float64(g) * ROOT_HALF))) * u


@internal(error_model="numpy")
def gated_relu(g: Any, u: Any) -> Any:
    """relu(g) · u."""
    return (ZERO if g < ZERO else g) * u  # noqa: FURB136 (this way round, NaN stays NaN)


@internal(error_model="numpy")
def gated_relu2(g: Any, u: Any) -> Any:
    """relu(g)² · u (So et al. 2021)."""
    return gated_relu(g, g) * u


@internal(error_model="numpy")
def gate(gates: Any, values: Any, activation: Any) -> None:
    """Put activation(gate) · value in each gate's place; values of one leave the activation alone."""
    if activation == 1:
        for i in range(gates.size):
            gates[i] = gated_silu(gates[i], values[i])
    elif activation == 2:
        for i in range(gates.size):
            gates[i] = gated_gelu_tanh(gates[i], values[i])
    elif activation == 3:
        for i in range(gates.size):
            gates[i] = gated_gelu(gates[i], values[i])
    elif activation == 4:
        for i in range(gates.size):
            gates[i] = gated_relu(gates[i], values[i])
    else:
        for i in range(gates.size):
            gates[i] = gated_relu2(gates[i], values[i])
