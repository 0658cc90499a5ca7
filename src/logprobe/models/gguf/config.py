"""Build the content of a model's `config.json` from its GGUF metadata.

An unknown architecture key is an error: ignoring one (rotary scaling or a soft cap, for instance) would give
plausible but wrong log-probabilities.
Sources: llama.cpp's model loaders, transformers' config classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import UnsupportedModelError
from logprobe.models.gguf.file import ROPE_FACTORS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from logprobe.models.gguf.file import GgufFile

_COMMON_KEYS: Final = {
    ".context_length": "max_position_embeddings",
    ".block_count": "num_hidden_layers",
    ".embedding_length": "hidden_size",
    ".feed_forward_length": "intermediate_size",
    ".attention.head_count": "num_attention_heads",
    ".attention.head_count_kv": "num_key_value_heads",
    ".attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_CHECKED_KEYS: Final = {
    ".attention.key_length",
    ".attention.value_length",
    ".rope.dimension_count",
    ".rope.freq_base",
    ".rope.scaling.type",
    ".vocab_size",
}
_GEMMA3_KEYS: Final = {
    ".attention.sliding_window",
    ".attention.sliding_window_pattern",
    ".final_logit_softcapping",
    ".rope.freq_base_swa",
    ".rope.scaling.factor",
}
_SIZES: Final = (
    "max_position_embeddings",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
)
_MAX_OF_ANY: Final = 1 << 24
# llama.cpp's defaults for keys that are missing in a gemma3 file (src/models/gemma3.cpp).
_GEMMA3_PATTERN: Final = 6
_GEMMA3_LOCAL_THETA: Final = 10_000.0
_GEMMA3_27B_LAYERS: Final = 62
# These are the same in all Llama 3 models; llama.cpp's converter stores only the resulting frequency factors
# (convert_hf_to_gguf.py).
_LLAMA3: Final = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def build_config(gguf: GgufFile) -> dict[str, Any]:
    """Return the content of `config.json` for a GGUF file, including the special token ids.

    Raises:
        UnsupportedModelError: the architecture, or one of its keys or values, is not supported.
    """
    architecture = _architecture(gguf)
    settings = _common_settings(gguf) | architecture.settings(gguf) | _special_ids(gguf)
    names = {
        "architectures": [architecture.class_name],
        "dtype": "float32",
        "model_type": architecture.model_type,
    }
    return names | settings


def _architecture(gguf: GgufFile) -> _Architecture:
    architecture = _ARCHITECTURES.get(gguf.architecture)
    if architecture is None:
        raise UnsupportedModelError(
            f"{gguf.path.name}: GGUF architecture {gguf.architecture!r:.80} is not supported "
            f"(supported: {', '.join(_ARCHITECTURES)}); use the model's safetensors folder or hub id instead"
        )
    unread = gguf.own_keys() - _COMMON_KEYS.keys() - _CHECKED_KEYS - architecture.extra_keys
    if unread:
        listed = ", ".join(gguf.architecture + key for key in sorted(unread))
        raise UnsupportedModelError(
            f"{gguf.path.name}: unknown key {listed:.300}, which could change the results; "
            "use the model's safetensors folder or hub id instead"
        )
    return architecture


def _common_settings(gguf: GgufFile) -> dict[str, Any]:
    settings = {
        name: gguf.value(key) for key, name in _COMMON_KEYS.items() if key != ".attention.head_count_kv"
    }
    for name in _SIZES:
        _check_size(gguf, name, settings[name])
    layers = settings["num_hidden_layers"]
    if isinstance(layers, int) and layers > len(gguf.shapes):
        raise UnsupportedModelError(
            f"{gguf.path.name}: has {layers} layers but only {len(gguf.shapes)} tensors; fetch a "
            "complete file"
        )
    heads = settings["num_attention_heads"]
    settings["num_key_value_heads"] = gguf.value(".attention.head_count_kv", heads)
    settings["rms_norm_eps"] = _positive(gguf, ".attention.layer_norm_rms_epsilon")
    if "token_embd.weight" not in gguf.shapes:
        raise UnsupportedModelError(f"{gguf.path.name}: has no token_embd.weight; fetch a complete file")
    settings["vocab_size"] = gguf.shapes["token_embd.weight"][0]
    settings["head_dim"] = _head_dim(gguf, settings["hidden_size"] // heads)
    settings["tie_word_embeddings"] = "output.weight" not in gguf.shapes
    lists = sorted(name for name, value in settings.items() if isinstance(value, list))
    if lists:
        raise UnsupportedModelError(
            f"{gguf.path.name}: {', '.join(lists)} differs between layers, which is not supported; "
            "use the model's safetensors folder or hub id instead"
        )
    return settings


def _check_size(gguf: GgufFile, name: str, value: Any) -> None:
    if isinstance(value, list):  # `_common_settings` reports values that differ between layers
        return
    if not isinstance(value, int) or not 0 < value <= _MAX_OF_ANY:
        raise UnsupportedModelError(
            f"{gguf.path.name}: {name} is {value!r:.80}, which is not a valid size; fetch the file again"
        )


def _head_dim(gguf: GgufFile, default: int) -> int:
    width = gguf.value(".attention.key_length", gguf.value(".rope.dimension_count", default))
    for key in (".attention.value_length", ".rope.dimension_count"):
        if gguf.value(key, width) != width:
            raise UnsupportedModelError(
                f"{gguf.path.name}: {gguf.architecture}{key} is {gguf.value(key)!r:.80}, but the head "
                f"dimension is {width!r:.80}, and different head dimensions are not supported; "
                "use the model's safetensors folder or hub id instead"
            )
    return int(width)


def _special_ids(gguf: GgufFile) -> dict[str, Any]:
    ids = {name: gguf.token_id(name) for name in ("bos", "eos", "eot", "padding")}
    ends = [token_id for token_id in dict.fromkeys((ids["eos"], ids["eot"])) if token_id is not None]
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": ids["padding"],
    }


def _plain_rope(gguf: GgufFile) -> dict[str, Any]:
    _require_scaling(gguf, {"none"})
    return {"rope_parameters": {"rope_type": "default", "rope_theta": _theta(gguf)}}


def _llama_rope(gguf: GgufFile) -> dict[str, Any]:
    """Return `rope_parameters`, with type `llama3` if the file has frequency factors (Llama 3.1 and later).

    The scaling factor is the largest frequency factor; the other parameters are the same in all Llama 3
    models.

    Raises:
        UnsupportedModelError: the factors differ from the ones that transformers computes for `llama3`.
    """
    rope = _plain_rope(gguf)["rope_parameters"]
    if ROPE_FACTORS not in gguf.shapes:
        return {"rope_parameters": rope}
    found = gguf.raw(ROPE_FACTORS).view(np.float32).reshape(-1)
    width = gguf.value(".embedding_length") // gguf.value(".attention.head_count")
    has_all = 2 * len(found) == _head_dim(gguf, width)
    rope |= {"rope_type": "llama3", "factor": _shortest(found.max()), **_LLAMA3}
    wave_lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(len(found)) / len(found))
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / wave_lengths
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    wanted = 1 / ((1 - smooth) / rope["factor"] + smooth)
    if not has_all or not np.allclose(found, wanted, rtol=1e-5):
        raise UnsupportedModelError(
            f"{gguf.path.name}: the rotary factors in {ROPE_FACTORS} are not those of Llama 3; "
            "use the model's safetensors folder or hub id instead"
        )
    return {"rope_parameters": rope}


def _llama_settings(gguf: GgufFile) -> dict[str, Any]:
    return {**_llama_rope(gguf), "attention_bias": "blk.0.attn_q.bias" in gguf.shapes, "mlp_bias": False}


def _gemma3_settings(gguf: GgufFile) -> dict[str, Any]:
    _require_scaling(gguf, {"none", "linear"})
    layers, heads, width = (
        gguf.value(".block_count"),
        gguf.value(".attention.head_count"),
        gguf.value(".embedding_length"),
    )
    period = gguf.value(".attention.sliding_window_pattern", _GEMMA3_PATTERN)
    far: dict[str, Any] = {"rope_type": "default", "rope_theta": _theta(gguf)}
    if gguf.value(".rope.scaling.type", "none") == "linear":
        far |= {"rope_type": "linear", "factor": _positive(gguf, ".rope.scaling.factor")}
    near = {
        "rope_type": "default",
        "rope_theta": _positive(gguf, ".rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
    }
    return {
        "query_pre_attn_scalar": width // heads
        if layers == _GEMMA3_27B_LAYERS
        else gguf.value(".attention.key_length"),
        "sliding_window": gguf.value(".attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)
        ],
        "rope_parameters": {"full_attention": far, "sliding_attention": near},
        "final_logit_softcapping": gguf.value(".final_logit_softcapping", None),
    }


def _theta(gguf: GgufFile) -> float:
    return _positive(gguf, ".rope.freq_base", 10_000.0)


def _positive(gguf: GgufFile, key: str, default: float | None = None) -> float:
    """Return a metadata value that must be a positive finite number.

    Raises:
        UnsupportedModelError: the key is missing and has no default, or the value is not finite and > 0.
    """
    value = gguf.value(key) if default is None else gguf.value(key, default)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModelError(
            f"{gguf.path.name}: {gguf.architecture}{key} must be a finite number > 0, got {value!r:.80}; "
            "fetch the file again"
        )
    return _shortest(value)


def _require_scaling(gguf: GgufFile, known: set[str]) -> None:
    found = gguf.value(".rope.scaling.type", "none")
    if found not in known:
        raise UnsupportedModelError(
            f"{gguf.path.name}: rotary scaling {found!r:.80} is not supported; "
            "use the model's safetensors folder or hub id instead"
        )


def _shortest(value: float) -> float:
    """Return the shortest decimal with the same float32 value: 1e-5 for 9.99999974e-06."""
    return float(str(np.float32(value)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Architecture:
    model_type: str
    class_name: str
    settings: Callable[[GgufFile], dict[str, Any]]
    extra_keys: frozenset[str] = frozenset()


_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "llama": _Architecture(model_type="llama", class_name="LlamaForCausalLM", settings=_llama_settings),
    "qwen2": _Architecture(model_type="qwen2", class_name="Qwen2ForCausalLM", settings=_plain_rope),
    "qwen3": _Architecture(model_type="qwen3", class_name="Qwen3ForCausalLM", settings=_plain_rope),
    "gemma3": _Architecture(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        settings=_gemma3_settings,
        extra_keys=frozenset(_GEMMA3_KEYS),
    ),
}
