"""Read a model's `config.json` and `generation_config.json` without transformers.

`ModelConfig` has the keys that describe the decoders in `engine.forward.families`, under transformers'
names. A key that the file leaves out is None, where transformers would use a default of the model family.
Files saved by transformers 5 leave nothing out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.models.folder import reading_errors

if TYPE_CHECKING:
    from pathlib import Path

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
}
# Keys about rotary embeddings that files from transformers 4 have besides `rope_scaling`.
_ROTARY: Final = ("rope_theta", "partial_rotary_factor")
# rotary types that extend the context beyond the training length
_EXTENDED: Final = ("llama3", "yarn", "longrope")
# Keys outside `text_config` that also apply to the language model.
_SHARED: Final = ("tie_word_embeddings",)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the language model in a `config.json`."""

    model_type: str
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
        content = _object(folder / CONFIG)
        if isinstance(text := content.get("text_config"), dict):
            content = {key: value for key, value in content.items() if key in _SHARED} | text
        content = {_OTHER_NAMES.get(key, key): value for key, value in content.items()}
        content["rope_parameters"] = _rope_parameters(content)
        return msgspec.convert(content, ModelConfig)


def read_generation_config(folder: Path) -> GenerationConfig:
    """Read `generation_config.json`; if there is no such file, all fields are None.

    Raises:
        UnsupportedModelError: the file cannot be read, or a key has a value of another type.
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


def _rope_parameters(content: dict[str, Any]) -> dict[str, Any] | None:
    """Return `rope_parameters`, built from the keys that transformers 4 wrote if necessary."""
    given = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise TypeError("rope_parameters must be an object")
    if any(key in given for key in content.get("layer_types") or ()):
        return given
    beside = {key: content[key] for key in _ROTARY if content.get(key) is not None}
    if not given and not beside:
        return None
    parameters: dict[str, Any] = beside | given
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] in _EXTENDED and "max_position_embeddings" in content:
        length = content.get("original_max_position_embeddings") or content["max_position_embeddings"]
        parameters.setdefault("original_max_position_embeddings", length)
    return parameters


def _ids(named: int | list[int] | None) -> frozenset[int]:
    return frozenset(named if isinstance(named, list) else [] if named is None else [named])
