"""The tested families and variants: their settings, and how their layers run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from families.tiny import WINDOW

BOUNDARY = 32  # of the rotary frequencies
Layers = Literal["native", "transformers"]


@dataclass(frozen=True)
class Row:
    """A variant of a family; `kind` and `special` make its configuration."""

    name: str
    kind: str
    layers: Layers = "transformers"  # with the checkpoint's weights
    special: dict[str, Any] = field(default_factory=dict)


def longrope(dim: int = 8) -> dict[str, Any]:
    """Return rotary settings with two very different sets of frequencies, for heads of size 2 · dim."""
    return {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * place for place in range(dim)],
            "long_factor": [2.0 + place for place in range(dim)],
            "original_max_position_embeddings": BOUNDARY,
            "factor": 4.0,
        },
    }


def phi3_longrope(dim: int = 8) -> dict[str, Any]:
    """The same for Phi-3, whose own key overrides that of its rotary settings."""
    return longrope(dim) | {"original_max_position_embeddings": BOUNDARY}


YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": BOUNDARY,
    }
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
MINISTRAL3 = {
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": BOUNDARY,
        "llama_4_scaling_beta": 0.5,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
PHIMOE = {
    "sliding_window": None,
    "rope_parameters": longrope()["rope_parameters"] | {"short_mscale": 1.1, "long_mscale": 1.3},
}
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

RIGHT = [
    Row("Llama", "llama", "native"),
    Row("Llama with biases", "llama", "native", {"attention_bias": True, "mlp_bias": True}),
    Row("Llama with longrope", "llama", "native", longrope()),
    Row("Llama with YaRN", "llama", "native", YARN),
    Row("Llama with dynamic NTK", "llama", "native", DYNAMIC),
    Row("Llama with linear scaling", "llama", "native", LINEAR),
    Row("Qwen2", "qwen2", "native"),
    Row("Qwen3", "qwen3", "native", {"use_sliding_window": False}),
    Row("Mistral", "mistral", "native"),
    Row("Ministral", "ministral", "native"),
    Row("Ministral 3", "ministral3", "native", MINISTRAL3),
    Row("Phi", "phi", "native"),
    Row("Phi-3", "phi3", "native", {"sliding_window": None}),
    Row("Phi-3 with a window", "phi3", "native"),
    Row("Phi-3 with longrope", "phi3", "native", {"sliding_window": None, **phi3_longrope()}),
    Row("Phi-3 with longrope and a window", "phi3", "native", phi3_longrope()),
    Row(
        "Phi-4-mini with longrope",
        "phi3",
        "native",
        special={
            "sliding_window": None,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": BOUNDARY,
            "rope_parameters": {**longrope(4)["rope_parameters"], "partial_rotary_factor": 0.5},
        },
    ),
    Row("Gemma", "gemma", "native"),
    Row("Gemma 2", "gemma2", "native"),
    Row("Gemma 3 (text)", "gemma3_text", "native"),
    Row("Gemma 3", "gemma3", "native"),
    Row("Gemma 3n (text)", "gemma3n_text"),
    Row(
        "Gemma 3n with sparse activations",
        "gemma3n_text",
        special={"activation_sparsity_pattern": [0.5, 0.9, 0.0]},
    ),
    Row("Gemma 4 (text)", "gemma4_text"),
    Row("OLMo", "olmo", "native"),
    Row("OLMo with clipped projections", "olmo", special={"clip_qkv": 0.5}),
    Row("OLMo 2", "olmo2", "native"),
    Row("OLMo 3", "olmo3", "native"),
    Row("Cohere", "cohere", "native"),
    Row("Cohere 2", "cohere2", "native"),
    Row("Granite", "granite", "native", {"residual_multiplier": 0.3, "attention_multiplier": 0.2}),
    Row("GLM", "glm", "native", {"partial_rotary_factor": 0.5}),
    Row("GLM-4", "glm4"),
    Row("StarCoder2", "starcoder2", "native"),
    Row("SmolLM3", "smollm3", "native"),
    Row("StableLM", "stablelm", "native"),
    Row("Nemotron", "nemotron"),
    Row("NanoChat", "nanochat"),
    Row("Helium", "helium", "native"),
    Row("Ernie 4.5", "ernie4_5", "native"),
    Row("Seed-OSS", "seed_oss", "native"),
    Row("EXAONE 4", "exaone4", "native"),
    Row("Arcee", "arcee", "native"),
    Row("Apertus", "apertus"),
    Row("GPT-2", "gpt2", "native"),
    Row("GPT-2 with scores by layer", "gpt2", "native", {"scale_attn_by_inverse_layer_idx": True}),
    Row("GPT-NeoX (Pythia)", "gpt_neox", "native"),
    Row("GPT-NeoX without parallel residual", "gpt_neox", "native", {"use_parallel_residual": False}),
    Row("GPT-BigCode", "gpt_bigcode"),
    Row("BioGPT", "biogpt"),
    Row("OPT", "opt"),
    Row(
        "OPT with narrow embeddings",
        "opt",
        special={"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    Row("Persimmon", "persimmon"),
    Row("Mixtral", "mixtral", "native"),
    Row("Qwen2-MoE", "qwen2_moe", "native"),
    Row("Qwen2-MoE with a window", "qwen2_moe", "native", WINDOWED),
    Row("Qwen3-MoE", "qwen3_moe", "native"),
    Row("OLMoE", "olmoe", "native"),
    Row("OLMoE with clipped projections", "olmoe", special={"clip_qkv": 0.5}),
    Row("Granite-MoE", "granitemoe"),
    Row("PhiMoE with a window", "phimoe"),
    Row("PhiMoE with longrope", "phimoe", special=PHIMOE),
    Row("DeepSeek-V2", "deepseek_v2"),
    Row("DeepSeek-V3", "deepseek_v3"),
    Row("GLM-4-MoE", "glm4_moe"),
    Row("Ernie 4.5 MoE", "ernie4_5_moe"),
    Row("Hunyuan", "hunyuan_v1_dense"),
    Row("Hunyuan-MoE", "hunyuan_v1_moe"),
    Row("dots.llm1", "dots1"),
    Row("gpt-oss", "gpt_oss"),
    Row("MiniMax-M2", "minimax_m2"),
]
