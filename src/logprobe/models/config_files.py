"""Read a model's `config.json` and `generation_config.json` without transformers.

`ModelConfig` has the keys that describe the decoders in `engine.forward.families`, under transformers' names.
A key that a file leaves out gets the value that transformers would use: the family's default in
config_defaults.json, or a value computed from other keys.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.models.folder import reading_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
# Keys in some model families → the names of the same keys in the others.
_OTHER_NAMES: Final = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "num_local_experts": "num_experts",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}
# Keys that `rope_parameters` replaces.
_ROTARY: Final = (
    "rope_theta",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "rope_scaling",
    "original_max_position_embeddings",
)
# rotary types that extend the context beyond the training length
_EXTENDED: Final = ("llama3", "yarn", "longrope")
# Keys outside `text_config` that also apply to the language model.
_SHARED: Final = ("tie_word_embeddings", "quantization_config")
_FULL, _SLIDING = "full_attention", "sliding_attention"  # layer types
# Families whose rotary parameters are always given by layer type.
_ROTARY_BY_TYPE: Final = ("gemma3_text", "olmo3")
# Families whose sliding window applies only with `use_sliding_window`, and the value without it.
_NO_WINDOW: Final = {"qwen2": None, "qwen3": None, "qwen3_moe": None, "qwen2_moe": 0}
# Families in which every n-th layer has full attention and the others a sliding window.
_PATTERNS: Final = {"cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3_text": 6, "olmo3": 4}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the language model in a `config.json`."""

    model_type: str
    content: dict[str, Any]  # all keys and values, including keys that are not fields
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool | None = None
    # Sizes.
    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None  # None: same as num_attention_heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    max_position_embeddings: int | None = None
    # Norms and activations; each model family uses one key for each.
    rms_norm_eps: float | None = None
    layer_norm_eps: float | None = None
    layer_norm_epsilon: float | None = None
    norm_epsilon: float | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    activation_function: str | None = None
    use_parallel_residual: bool | None = None
    # Attention.
    rope_parameters: dict[str, Any] | None = None  # for all layers, or by layer type
    layer_types: list[str] | None = None  # such as `sliding_attention`, by layer
    sliding_window: int | None = None
    no_rope_layers: list[int] | None = None  # by layer; 0 if the layer has no rotary embedding
    attn_logit_softcapping: float | None = None
    query_pre_attn_scalar: float | None = None
    use_bidirectional_attention: bool | None = None
    scale_attn_weights: bool | None = None
    scale_attn_by_inverse_layer_idx: bool | None = None
    attention_multiplier: float | None = None
    # Factors and caps.
    final_logit_softcapping: float | None = None
    logit_scale: float | None = None
    logits_scaling: float | None = None
    embedding_multiplier: float | None = None
    residual_multiplier: float | None = None
    # Experts.
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    norm_topk_prob: bool | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end a text."""
        return _ids(self.eos_token_id)

    def is_default(self, key: str) -> bool:
        """Return True if a key has the default value of the model family, or is null."""
        value = self.content[key]
        return value is None or value == _defaults(self.model_type).get(key)


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids in a `generation_config.json`; the sampling defaults in the file are not used."""

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end a text."""
        return _ids(self.eos_token_id)


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json`; for a multimodal model, read the part about the language model.

    Raises:
        UnsupportedModelError: the file cannot be read, or a value has a wrong type.
    """
    with reading_errors(f"{folder}: its {CONFIG}"):
        return parse_config(_object(folder / CONFIG))


def parse_config(content: Mapping[str, Any]) -> ModelConfig:
    """Interpret the content of a `config.json` as transformers does; see `read_config`.

    Raises:
        TypeError: a part that must be a JSON object is not one.
        msgspec.ValidationError: `model_type` is missing, or a value has a wrong type.
    """
    if isinstance(text := content.get("text_config"), dict):
        content = {key: value for key, value in content.items() if key in _SHARED} | text
    named = {_OTHER_NAMES.get(key, key): value for key, value in content.items()}
    kind = named.get("model_type")
    filled = {**_defaults(kind), **named}
    filled["rope_parameters"] = _rope_parameters(filled)
    if kind in _NO_WINDOW and not filled.get("use_sliding_window"):
        filled["sliding_window"] = _NO_WINDOW[kind]
    if kind == "gemma" and filled.get("hidden_act") == "gelu":  # a mistake in the first published files
        filled["hidden_act"] = "gelu_pytorch_tanh"
    if kind == "smollm3" and filled.get("no_rope_layers") is None:
        interval, layers = filled["no_rope_layer_interval"], range(filled["num_hidden_layers"])
        filled["no_rope_layers"] = [int((layer + 1) % interval != 0) for layer in layers]
    if filled.get("layer_types") is None:
        filled["layer_types"] = _layer_types(filled)
    replaced = {*_ROTARY, "sliding_window_pattern"} if kind in {"cohere2", "gemma3_text"} else {*_ROTARY}
    known = {key: value for key, value in filled.items() if key not in replaced}
    return msgspec.convert(known | {"content": known}, ModelConfig)


def read_generation_config(folder: Path) -> GenerationConfig:
    """Read `generation_config.json`; if there is no such file, all fields are None.

    Raises:
        UnsupportedModelError: the file cannot be read, or a value has a wrong type.
    """
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return GenerationConfig()
    with reading_errors(f"{folder}: its {GENERATION_CONFIG}"):
        return msgspec.convert(_object(path), GenerationConfig)


def _object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())  # accepts Infinity as a number, as transformers does
    if not isinstance(content, dict):
        raise TypeError("must be a JSON object")
    return content


@functools.cache
def _all_defaults() -> dict[str, dict[str, Any]]:
    return {
        kind: {_OTHER_NAMES.get(key, key): value for key, value in defaults.items()}
        for kind, defaults in _object(Path(__file__).with_name("config_defaults.json")).items()
    }


def _defaults(kind: Any) -> dict[str, Any]:
    """Return transformers' defaults for a model family; empty for families that are not in the file."""
    return _all_defaults().get(kind, {}) if isinstance(kind, str) else {}


def _layer_types(filled: Mapping[str, Any]) -> list[str] | None:
    """Return the layer types that transformers uses if the file has none; None for families without them."""
    kind, window = filled.get("model_type"), filled.get("sliding_window")
    layers = range(filled.get("num_hidden_layers", 0))
    if kind in _PATTERNS:
        given = filled.get("sliding_window_pattern") or filled.get("_sliding_window_pattern")
        period = int(_PATTERNS[kind] if given is None or kind in {"gemma2", "olmo3"} else given)
        is_full = [(layer + 1) % period == 0 for layer in layers]
    elif kind == "cwm":
        is_full = [layer % 4 == 0 for layer in layers]
    elif kind == "ministral":
        is_full = [window is None for _ in layers]
    elif kind in {"qwen2", "qwen3"}:
        is_full = [window is None or layer < filled["max_window_layers"] for layer in layers]
    elif kind == "qwen2_moe":
        has_windows = filled.get("use_sliding_window")
        is_full = [
            bool(layer % 2) or layer >= filled["max_window_layers"] or not has_windows for layer in layers
        ]
    elif kind == "smollm3":
        has_windows = filled.get("use_sliding_window") and window is not None
        is_full = [bool(rotates) or not has_windows for rotates in filled["no_rope_layers"]]
    else:
        return None
    return [_FULL if full else _SLIDING for full in is_full]


def _rope_parameters(filled: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `rope_parameters`, if necessary built from the keys that transformers 4 wrote."""
    kind = filled.get("model_type")
    given = filled.get("rope_scaling") or filled.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise TypeError("rope_parameters must be an object")
    theta, part = filled.get("rope_theta"), filled.get("partial_rotary_factor")
    if kind in _ROTARY_BY_TYPE:
        return _by_layer_type(filled)
    siblings = {"rope_theta": theta, "partial_rotary_factor": part}
    siblings = {key: value for key, value in siblings.items() if value is not None}
    if not given and not siblings:
        return None
    nested = [key for key in given if key in {_FULL, _SLIDING, *(filled.get("layer_types") or ())}]
    if nested:
        return {
            key: {"rope_type": value.get("type", "default"), **siblings, **value}
            if key in nested and isinstance(value, dict)
            else value
            for key, value in given.items()
        }
    parameters: dict[str, Any] = siblings | given
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if kind == "phi3" and parameters["rope_type"] in {"su", "yarn"}:  # older names
        parameters["rope_type"] = "longrope"
    if parameters["rope_type"] in _EXTENDED:
        if (length := filled.get("original_max_position_embeddings")) is not None:
            parameters["original_max_position_embeddings"] = length
        elif "max_position_embeddings" in filled:
            parameters.setdefault("original_max_position_embeddings", filled["max_position_embeddings"])
    return parameters


def _by_layer_type(filled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of layers with full attention and with a sliding window."""
    given = filled.get("rope_parameters") or {}
    far, near = (dict(given.get(name) or {"rope_type": "default"}) for name in (_FULL, _SLIDING))
    far.update(filled.get("rope_scaling") or {})
    far.setdefault("rope_theta", filled["rope_theta"])
    # For layers with a sliding window, transformers ignores `rope_theta` of an olmo3 file.
    default = _defaults(filled["model_type"])["rope_theta"]
    near.setdefault("rope_theta", filled.get("rope_local_base_freq", default))
    for parameters in (far, near):
        parameters.setdefault("rope_type", parameters.get("type", "default"))
    return {**given, _FULL: far, _SLIDING: near}


def _ids(named: int | list[int] | None) -> frozenset[int]:
    return frozenset(named if isinstance(named, list) else [] if named is None else [named])
