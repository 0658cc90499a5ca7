"""Reference implementations of the Triton kernels in PyTorch, in float64: slow, simple, for any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from logprobe.kernels.attention.api import ScoreRule
    from logprobe.kernels.triton.attention import Tiles
    from logprobe.kernels.triton.layers import Norm

_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x) ** 2,
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `products.linear` in float64; `x` is (rows, inputs), not split into bfloat16 pieces."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def norm(x: Tensor, layer: Norm) -> Tensor:
    """Compute `layers.norm` in float64."""
    parts = x.double().view(len(x), -1, len(layer.weight))
    if layer.is_centred:
        parts = parts - parts.mean(-1, keepdim=True)
    parts = parts / (parts.square().mean(-1, keepdim=True) + layer.epsilon).sqrt() * layer.weight.double()
    out: Tensor = (parts if layer.bias is None else parts + layer.bias.double()).flatten(1)
    return out


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, *, is_paired: bool) -> Tensor:
    """Rotate queries or keys, (rows, heads, head_dim), as `layers.rotate_and_store` does."""
    pairs = cosines.shape[1]
    x, (cosines, sines) = x.double(), (part.double()[:, None] for part in (cosines, sines))
    rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if is_paired:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
    first, second = first * cosines - second * sines, second * cosines + first * sines
    rotated = torch.stack((first, second), -1).flatten(-2) if is_paired else torch.cat((first, second), -1)
    return torch.cat((rotated, rest), -1)


def gate(x: Tensor, activation: str, *, has_values: bool) -> Tensor:
    """Return activation(gates) * values, or activation(gates), as `layers.gate` does."""
    gates = x.double()
    if not has_values:
        return _ACTIVATIONS[activation](gates)
    gates, values = gates.chunk(2, dim=1)
    return _ACTIVATIONS[activation](gates) * values


def attend(query: Tensor, pool: tuple[Tensor, Tensor], tiles: Tiles, rule: ScoreRule) -> Tensor:
    """Return the attention output of `attention.attend`, (tokens, heads * head_dim) float64.

    Rows of tokens that are not in `tiles` are 0.
    """
    keys, values = pool
    group = query.shape[1] // keys.shape[1]
    out = torch.zeros_like(query, dtype=torch.float64)
    columns = (tiles.tokens, tiles.counts, tiles.begins, tiles.lengths)
    for first, count, begin, length in zip(*(column.tolist() for column in columns), strict=True):
        for number in range(count):
            end = length + number
            start = 0 if rule.window is None else max(0, end - rule.window)
            slots = tiles.slots[begin + start : begin + end].long()
            key, value = (part[slots].double().repeat_interleave(group, 1) for part in (keys, values))
            scores = torch.einsum("hd,khd->hk", query[first + number].double(), key) * rule.scale
            if rule.softcap is not None:
                scores = torch.tanh(scores / rule.softcap) * rule.softcap
            out[first + number] = torch.einsum("hk,khd->hd", scores.softmax(-1), value)
    return out.flatten(1)
