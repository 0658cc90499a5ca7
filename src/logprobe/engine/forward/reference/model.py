"""The decoder: embeddings, the loop over layers, and the output head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.engine.forward.reference.layers import attend, mixture, mlp, norm
from logprobe.engine.forward.reference.rotary import cosines_and_sines, rotate
from logprobe.engine.forward.reference.settings import settings_of
from logprobe.engine.forward.reference.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from numpy.typing import ArrayLike, NDArray

    from logprobe.engine.forward.families import Family
    from logprobe.engine.forward.reference.settings import Settings
    from logprobe.engine.forward.reference.weights import Array
    from logprobe.models.config_files import ModelConfig


def logits(
    config: ModelConfig,
    weights: Mapping[str, NDArray[Any]],
    token_ids: ArrayLike,
    *,
    start: int = 0,
    rotary_dtype: type[np.floating[Any]] = np.float64,
) -> Array:
    """Return the logits after each token of a text, (positions, vocabulary) float64.

    Args:
        config: configuration of the model.
        weights: dequantized arrays by transformers' parameter names.
        token_ids: (positions,) integers.
        start: position of the first token.
        rotary_dtype: dtype of rotary frequencies and angles; float32 matches transformers at large
            positions.

    Raises:
        UnsupportedModelError: the model's family is not supported.
        KeyError: a weight or a rotary parameter is missing or unknown.
    """
    settings = settings_of(config, rotary_dtype)
    family, factors = settings.family, settings.factors
    decoder = Weights(weights, decoder_name(weights, family))
    ids = np.asarray(token_ids, np.int64)
    positions = start + np.arange(len(ids))
    hidden = factors.embedding * decoder.rows(f"{family.embedding}.weight", ids)
    if family.positions is not None:
        hidden += decoder.rows(f"{family.positions}.weight", positions)
    for number in range(len(settings.rules)):
        layer = decoder.within(f"{family.layers}.{number}", is_transposed=family.is_transposed)
        hidden = run_layer(settings, layer, number, hidden, positions)
    hidden = _norm(settings, decoder, family.last_norm, hidden)
    head = head_name(weights) or decoder.within(family.embedding).module
    outputs = factors.logits * Weights(weights).linear(head, hidden)
    return outputs if factors.softcap is None else factors.softcap * np.tanh(outputs / factors.softcap)


def run_layer(
    settings: Settings, layer: Weights, number: int, hidden: Array, positions: NDArray[np.int64]
) -> Array:
    """Return the hidden states after layer `number`, (positions, hidden size).

    Attention and MLP each add their output to the hidden states, with norms before them, after them, or both.
    In parallel layers, both read the layer's input; otherwise the MLP reads the hidden states after
    attention.
    """
    family, factor = settings.family, settings.factors.residual
    norms = family.layer_norms(is_parallel=settings.is_parallel)
    before_attention, after_attention, before_mlp, after_mlp = norms
    x = _norm(settings, layer, before_attention, hidden)
    attended = _norm(settings, layer, after_attention, _attention(settings, layer, number, x, positions))
    added = hidden + factor * attended
    if not settings.is_parallel:
        x = _norm(settings, layer, before_mlp, added)
    elif before_mlp is not None:
        x = _norm(settings, layer, before_mlp, hidden)
    facts = family.experts
    if facts is not None and f"{facts.router}.weight" in layer:
        outputs = mixture(settings, layer, facts, x)
    else:
        outputs = mlp(settings, layer, family.gates, family.down, x)
    return added + factor * _norm(settings, layer, after_mlp, outputs)


def _attention(
    settings: Settings, layer: Weights, number: int, x: Array, positions: NDArray[np.int64]
) -> Array:
    """Return the output of a layer's attention, (positions, hidden size)."""
    query, key, value = _projections(settings, layer, x)
    rotary, family = settings.rotary[number], settings.family
    if rotary is not None:
        cosines, sines = cosines_and_sines(rotary, positions)
        query, key = (rotate(part, cosines, sines, is_paired=family.is_paired) for part in (query, key))
    if settings.factors.queries is not None:  # Ministral 3, after Llama 4
        beta, length = settings.factors.queries
        query = query * (1 + beta * np.log(1 + positions // length))[:, None, None]
    attended = attend(query, key, value, settings.rules[number])
    return layer.linear(family.output, attended.reshape(len(x), -1))


def _projections(settings: Settings, layer: Weights, x: Array) -> tuple[Array, Array, Array]:
    """Return queries, keys and values, each (positions, heads, head size)."""
    family, head_dim = settings.family, settings.head_dim
    outputs = np.concatenate([layer.linear(name, x) for name in family.projections], axis=-1)
    if family.is_by_head:
        by_head = outputs.reshape(len(x), settings.num_heads, 3, head_dim)
        return by_head[:, :, 0], by_head[:, :, 1], by_head[:, :, 2]
    query_width, key_width = settings.num_heads * head_dim, settings.num_key_heads * head_dim
    parts = np.split(outputs, [query_width, query_width + key_width], axis=-1)
    for index, name in enumerate(family.head_norms):
        parts[index] = _norm(settings, layer, name, parts[index])
    query, key, value = (part.reshape(len(x), -1, head_dim) for part in parts)
    return query, key, value


def _norm(settings: Settings, module: Weights, name: str | None, x: Array) -> Array:
    """Return `x` after the norm `name` of a module; None: `x` itself."""
    if name is None:
        return x
    weight = module[f"{name}.weight"] if settings.family.has_norm_weights else None
    return norm(settings.family.norm, x, weight, module.get(f"{name}.bias"), settings.epsilon)


def decoder_name(names: Collection[str], family: Family) -> str:
    """Return the module name of the decoder, which multimodal models nest deeper.

    Raises:
        KeyError: no module has an embedding and layers.
    """
    embedding = f".{family.embedding}.weight"
    for name in names:
        module = f".{name}".removesuffix(embedding)
        if f".{name}".endswith(embedding) and any(
            f".{other}".startswith(f"{module}.{family.layers}.0.") for other in names
        ):
            return module.removeprefix(".")
    raise KeyError(embedding)


def head_name(names: Iterable[str]) -> str | None:
    """Return the module name of the output head; None if it has no weight of its own."""
    heads = (name.removesuffix(".weight") for name in names if f".{name}".endswith(".lm_head.weight"))
    return next(heads, None)
