"""Small random decoders of the supported families, and running tokens through them step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.config import EngineConfig
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.plan.scheduler import Span, StepPlan
from logprobe.models import resolve
from placed import Placed

if TYPE_CHECKING:
    from pathlib import Path

HALF_ROTATES = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
# Two kinds of rotary frequencies.
GEMMA3 = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 9}
# Kind → special settings.
NATIVE: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 9},
    "Qwen2": {},  # projection biases
    "Qwen3": {"head_dim": 16},  # norms per head
    "SmolLM3": {"no_rope_layers": [1, 1, 0, 1]},  # a layer without rotary embedding
    "Phi3": {"rope_parameters": HALF_ROTATES},  # joined projections, and half of each head rotates
    "Granite": {"residual_multiplier": 0.3, "attention_multiplier": 0.2},
    "Olmo2": {},  # norms after the blocks, and over all heads
    "Olmo3": {"sliding_window": 9},
    "Gemma": {"head_dim": 12},  # another activation
    "Gemma2": GEMMA,  # four norms
    "Gemma3Text": {**GEMMA, "layer_types": GEMMA3},
    "GPT2": {"n_inner": 96},  # no rotary embedding, no gates
    "GPTNeoX": {"rope_parameters": HALF_ROTATES},  # projections interleaved by head, parallel residual
    "StableLm": {"rope_parameters": HALF_ROTATES, "use_qkv_bias": True},  # LayerNorm
    "Cohere2": {"sliding_window": 9},  # interleaved rotation, in the layers with windows
    "Glm": {"head_dim": 12, "rope_parameters": HALF_ROTATES},  # interleaved rotation of half of each head
    "Ernie4_5": {"head_dim": 12},
    "Ministral3": {  # position-dependent query scale
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
}
# Kinds whose steps are not recorded.
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {  # a shared expert, and a layer without experts
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
}
TRANSFORMERS: dict[str, dict[str, Any]] = {"Glm4": {"head_dim": 12}, "Nemotron": {"head_dim": 12}}


def spread_out(model: Any) -> None:
    """Change weights so that errors in them become visible."""
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name and "bias" not in name), std=0.2)


def loaded(folder: Path, weights: Any = "checkpoint", arithmetic: Any = "auto") -> NativeForward:
    """Load the forward pass of a folder's model."""
    name = str(folder)
    settings: dict[str, Any] = {"weights": weights, "arithmetic": arithmetic}
    return NativeForward(EngineConfig(model=name, kv_cache_memory_bytes=1 << 22, **settings), resolve(name))


def hidden(forward: NativeForward, prompts: list[Any], *, split: int, loras: Any = None) -> Any:
    """Return the last hidden states of each prompt; a step runs up to `split` tokens of each, batched."""
    ends = np.cumsum([len(ids) for ids in prompts])
    slots = [np.arange(end - len(ids), end, dtype=np.int32) for ids, end in zip(prompts, ends, strict=True)]
    loras = loras or [None] * len(prompts)
    sequences: list[Any] = list(map(Placed, prompts, slots, loras))
    for start in range(0, max(map(len, prompts)), split):
        spans = [Span(one, start, min(start + split, len(one.token_ids))) for one in sequences]
        forward.run(StepPlan(tokens=[span for span in spans if span.start < span.end]).batch())
    return [torch.from_numpy(forward.hidden_rows(own)) for own in slots]


def logprobs(forward: NativeForward, prompts: list[Any], *, split: int, loras: Any = None) -> torch.Tensor:
    """Return log-probabilities after every token of all prompts, (num_tokens, vocabulary) float64, nats."""
    with torch.inference_mode():
        rows = torch.cat(hidden(forward, prompts, split=split, loras=loras))
        return torch.from_numpy(forward.head(rows.numpy())).double().log_softmax(-1)
