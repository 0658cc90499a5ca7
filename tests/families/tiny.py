"""Tiny random models of every causal language model family in transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 160
WINDOW = 16
CONTEXT_LEN = 128
# Settings for those keys that a configuration has; families use different names for the same thing.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "n_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "attention_heads", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), CONTEXT_LEN),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW),
    "encoder_layers": 2,
    "embedding_size": 64,
    "initializer_range": 0.2,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Families with constraints between settings.
LATENT = {"head_dim": 16, "num_key_value_heads": 4}  # attention through a low-rank projection
ALL_HEADS = {"num_key_value_heads": 4}
GEMMA_4 = {
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "dots3_note": ALL_HEADS,
    "dots3_note_text": ALL_HEADS,
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": GEMMA_4,
    "gemma4_unified_text": GEMMA_4,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]], "num_layers": 3},
    "kimi_linear": {"num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention"]},
    "longcat_flash": LATENT,
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minicpm3": LATENT,
    "reformer": {"is_decoder": True},
    "xlm": {"n_words": VOCAB_SIZE, "emb_dim": 64},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "youtu": LATENT,
    "zaya": {"num_experts_per_tok": 1},
}


def config_of(kind: str, **special: Any) -> Any:
    """Return a configuration of a few thousand parameters; `special` changes its language model's part."""
    return _configured(CONFIG_MAPPING[kind], SPECIAL.get(kind, {}) | special)


def _configured(cls: Any, special: dict[str, Any]) -> Any:
    default = cls()
    known = default.to_dict()
    parts = {
        name: _configured(type(part), special).to_dict() if "text" in name else _small_vision(part)
        for name in getattr(cls, "sub_configs", {})
        if (part := getattr(default, name, None)) is not None
    }
    small = {name: value for name, value in SMALL.items() if name in known}
    return cls(**small | parts | ({} if any("text" in name for name in parts) else special))


def _small_vision(part: Any) -> dict[str, Any]:
    known = part.to_dict()
    values: dict[str, Any] = type(part)(**{name: VISION[name] for name in VISION if name in known}).to_dict()
    return values


def model_of(kind: str, *, seed: int = 0, **special: Any) -> Any:
    """Return a model whose weights make logits spread and every part have a visible effect."""
    config = config_of(kind, **special)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])._from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                is_embedding = any(part in name for part in ("emb", "wte", "lm_head"))
                torch.nn.init.normal_(weight, std=0.4 if is_embedding else 0.15)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.eval().requires_grad_(requires_grad=False)
    return model
