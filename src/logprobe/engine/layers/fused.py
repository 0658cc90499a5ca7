"""Decoder layers of the usual form in few, large operations (CPU, float32).

A layer as Llama's, Qwen's or Mistral's runs as one product for queries, keys and values, one kernel that
rotates and stores them, attention, and products that add the residual themselves. A layer is replaced only
where a trial gives the layer's own numbers; every other stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from logprobe.engine.forward.attention import AttentionPlan, Chunk, attend
from logprobe.engine.forward.pool import KVPool
from logprobe.engine.layers.packed import JoinedPart, added, join
from logprobe.kernels.layers.rotary import Projections, rotate_and_store

if TYPE_CHECKING:
    from logprobe.kernels.attention.api import ScoreRule

    Rotary = tuple[torch.Tensor, torch.Tensor]

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
ATTENTION_PARTS = {*PROJECTIONS, "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
TRIAL_TOKENS = 6
TRIAL_TOLERANCE = 1e-5  # of the largest number; two orders of summation differ by less


class FusedAttention(nn.Module):
    """Self-attention over the pool, its three projections joined into one."""

    def __init__(self, attention: Any, rule: ScoreRule, key_dim: int) -> None:
        super().__init__()
        linears = [getattr(attention, name) for name in PROJECTIONS]
        self.layer_idx: int = attention.layer_idx
        self.qkv_proj: Any = join(linears)
        for name, linear in zip(PROJECTIONS, linears, strict=True):
            setattr(self, name, JoinedPart(linear))
        self.o_proj = attention.o_proj
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.widths = [linear.out_features for linear in linears]
        self._key_dim = key_dim
        self._kv_heads = self.widths[1] // key_dim
        self.rule = rule

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, rotary: Rotary, plan: AttentionPlan
    ) -> torch.Tensor:
        """(num_tokens, hidden size) and what to add → (num_tokens, hidden size)."""
        query, key, value = self._projected(x)
        pool = plan.pool.layer(self.layer_idx, self._by_head(key), self._by_head(value))
        query = rotate_and_store(Projections(query, key, value), *rotary, pool, plan.slots)
        attended = attend(plan, self.layer_idx, query, self.rule)
        return added(self.o_proj, attended.flatten(1), residual)

    def _projected(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = list(self.qkv_proj(x).split(self.widths, dim=1))
        for name, part in zip(PROJECTIONS, parts, strict=True):
            getattr(self, name).add_lora_(part, x)
        for place, norm in enumerate((self.q_norm, self.k_norm)):
            if norm is not None:
                parts[place] = norm(parts[place].unflatten(1, (-1, self._key_dim))).flatten(1)
        return parts

    def _by_head(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(len(rows), self._kv_heads, -1)


class FusedLayer(nn.Module):
    """A decoder layer: attention and a feed-forward part, a norm before each, a residual around each."""

    def __init__(self, layer: Any, attention: FusedAttention) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: Rotary,
        logprobe_plan: AttentionPlan,
        **_: Any,
    ) -> torch.Tensor:
        """(1, num_tokens, hidden size) → the same."""
        hidden = hidden_states[0]
        rotary = (position_embeddings[0][0], position_embeddings[1][0])
        hidden = self.self_attn(self.input_layernorm(hidden), hidden, rotary, logprobe_plan)
        return added(self.mlp, self.post_attention_layernorm(hidden), hidden)[None]


def fuse_(model: Any) -> None:
    """Replace the layers of a model that are of the usual form; its attention must be the pool's by now."""
    decoder = model.base_model
    layers, rotary = getattr(decoder, "layers", []), getattr(decoder, "rotary_emb", None)
    for index, layer in enumerate(layers):
        if rotary is not None and _has_usual_form(layer):
            fused = _fused(layer, rotary)
            if fused is not None:
                layers[index] = fused


def _has_usual_form(layer: nn.Module) -> bool:
    if {name for name, _ in layer.named_children()} != LAYER_PARTS:
        return False
    attention: Any = layer.self_attn
    parts = dict(attention.named_children())
    return parts.keys() - HEAD_NORMS == ATTENTION_PARTS and all(
        type(parts[name]) is nn.Linear for name in ATTENTION_PARTS
    )


def _fused(layer: Any, rotary_embedding: nn.Module) -> FusedLayer | None:
    """The fused form of a layer, where it gives the layer's own numbers."""
    width = layer.self_attn.q_proj.in_features
    x = torch.randn(1, TRIAL_TOKENS, width, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(TRIAL_TOKENS)
    rotary = rotary_embedding(x, position_ids=positions[None])
    plan = AttentionPlan(KVPool(TRIAL_TOKENS), positions, [Chunk(0, TRIAL_TOKENS, positions)], None)
    options = {"attention_mask": None, "position_embeddings": rotary, "logprobe_plan": plan}
    expected = layer(x, position_ids=positions[None], **options)
    index = layer.self_attn.layer_idx
    key_dim = plan.pool.keys[index].shape[2]
    norms = [getattr(layer.self_attn, name, None) for name in sorted(HEAD_NORMS)]
    is_by_head = all(norm is None or norm.weight.numel() == key_dim for norm in norms)
    if not is_by_head or rotary[0].shape[2] != key_dim or not isinstance(expected, torch.Tensor):
        return None
    fused = FusedLayer(layer, FusedAttention(layer.self_attn, plan.rules[index], key_dim))
    difference = (fused(x, **options) - expected).abs().max() / expected.abs().max()
    return fused if difference <= TRIAL_TOLERANCE else None
