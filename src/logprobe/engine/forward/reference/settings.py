"""Sizes and options of a decoder, read from the model's configuration.

Module names and the structure of layers come from `families`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.engine.forward.config import Factors, Rule
from logprobe.engine.forward.families import ACTIVATIONS, FAMILIES, Family
from logprobe.engine.forward.reference.rotary import Rotary
from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from logprobe.models.config_files import ModelConfig

# Families with `sliding_window` in all layers, and those with it in layers of type `sliding_attention`.
WINDOW_IN_ALL: Final = {"mistral", "ministral3", "mixtral", "phi3", "qwen3_moe", "starcoder2"}
WINDOW_BY_TYPE: Final = {
    *("cohere2", "cwm", "exaone4", "gemma2", "gemma3_text", "ministral", "olmo3"),
    *("qwen2", "qwen2_moe", "qwen3", "smollm3"),
}
# Families that rotate only a part of each head; the others do not read the key.
ROTATES_PART: Final = {"glm", "gpt_neox", "phi", "phi3", "stablelm"}
# Families whose projections ignore `head_dim`.
FIXED_HEAD_DIM: Final = {"gpt2", "gpt_neox"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes and options of a decoder; lists have one entry per layer."""

    family: Family
    num_heads: int
    num_key_heads: int  # heads of keys and values
    head_dim: int
    epsilon: float  # of the norms
    activation: str
    is_parallel: bool  # attention and MLP read the same hidden states
    factors: Factors
    rules: list[Rule]
    rotary: list[Rotary | None]  # None: the layer has no rotary embedding
    experts_per_token: int
    normalises_experts: bool


def settings_of(config: ModelConfig, rotary_dtype: type[np.floating[Any]] = np.float64) -> Settings:
    """Return the settings in a model's configuration.

    Args:
        config: configuration of the model.
        rotary_dtype: dtype in which rotary frequencies and angles are computed.

    Raises:
        UnsupportedModelError: the model's family or activation is not supported.
        KeyError: a rotary parameter is missing or unknown.
        TypeError: a key that the family needs is missing.
    """
    values: Any = config  # a missing key is None, and using it raises TypeError
    kind = config.model_type
    if kind not in FAMILIES:
        raise UnsupportedModelError(
            f"config: model_type {kind!r} is unknown; use one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    if (activation := ACTIVATIONS.get(getattr(values, family.activation))) is None:
        raise UnsupportedModelError(f"{family.activation} of its configuration is not supported")
    head_dim = values.hidden_size // values.num_attention_heads
    rotary_head_dim = values.head_dim or head_dim
    if kind not in FIXED_HEAD_DIM:
        head_dim = rotary_head_dim
    layers = range(values.num_hidden_layers)
    return Settings(
        family=family,
        num_heads=values.num_attention_heads,
        num_key_heads=values.num_key_value_heads or values.num_attention_heads,
        head_dim=head_dim,
        epsilon=getattr(values, family.epsilon) if isinstance(family.epsilon, str) else family.epsilon,
        activation=activation,
        is_parallel=family.is_parallel(values),
        factors=family.factors(values),
        rules=[_rule(values, head_dim, layer) for layer in layers],
        rotary=[
            _rotary(values, rotary_head_dim, layer, rotary_dtype) if family.rotates(values, layer) else None
            for layer in layers
        ],
        experts_per_token=0 if family.experts is None else values.num_experts_per_tok,
        normalises_experts=family.experts is not None and family.experts.normalises(values),
    )


def _rule(values: Any, head_dim: int, layer: int) -> Rule:
    """Return the scale, window and soft cap of a layer's attention."""
    kind = values.model_type
    scale, softcap, has_window = head_dim**-0.5, None, kind in WINDOW_IN_ALL
    if kind in WINDOW_BY_TYPE:
        has_window = values.layer_types[layer] == "sliding_attention"
    if kind in {"gemma2", "gemma3_text"}:
        scale = values.query_pre_attn_scalar**-0.5
    if kind == "gemma2":
        softcap = values.attn_logit_softcapping
    if kind == "granite":
        scale = values.attention_multiplier
    if kind == "gpt2":
        scale = scale if values.scale_attn_weights else 1.0
        scale /= layer + 1 if values.scale_attn_by_inverse_layer_idx else 1
    return Rule(scale, (values.sliding_window or None) if has_window else None, softcap)


def _rotary(values: Any, head_dim: int, layer: int, dtype: type[np.floating[Any]]) -> Rotary:
    outer = values.rope_parameters  # of all layers, or by layer type
    name = None if "rope_type" in outer else values.layer_types[layer]
    parameters = outer if name is None else outer[name]
    reads_part = values.model_type in ROTATES_PART or parameters["rope_type"] != "default"
    part = parameters.get("partial_rotary_factor", 1.0) if reads_part else 1.0
    return Rotary(
        name=name,
        parameters=parameters,
        head_dim=head_dim,
        width=int(head_dim * part),
        context_len=values.max_position_embeddings,
        is_truncated=outer.get("truncate", True),  # transformers does not look for it by layer type
        dtype=dtype,
    )
