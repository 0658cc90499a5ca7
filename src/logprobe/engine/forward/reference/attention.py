"""Causal attention (Vaswani et al. 2017) with grouped heads, sliding windows, soft caps and sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.engine.forward.reference.functions import softmax

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from logprobe.engine.forward.config import Rule
    from logprobe.engine.forward.reference.weights import Array


def attend(query: Array, key: Array, value: Array, rule: Rule, sinks: Array | None = None) -> Array:
    """Return, for each query, the weighted mean of the visible values, (positions, heads, head size).

    The weights are the softmax of the scores, scale · query · key. With a soft cap, a score becomes cap ·
    tanh(score / cap) (Gemma 2, 2024). Consecutive query heads share one head of keys and values
    (grouped-query attention, Ainslie et al. 2023).

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
