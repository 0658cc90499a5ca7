"""Decoder layers of the usual form in few, large operations (CPU, float32).

A layer as Llama's, Gemma's or OLMo's runs as one product for queries, keys and values, one kernel that
rotates and stores them, attention, and products that add the residual themselves where no norm comes
between. A layer is replaced only where its parts and its source are of a form that was read (`forms`), and
where it then gives the layer's own numbers on what the model really sent through it; every other stays as it
is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from logprobe.engine.forward.attention import AttentionPlan, Chunk, attend
from logprobe.engine.forward.pool import KVPool
from logprobe.engine.layers import forms
from logprobe.engine.layers.packed import (
    GatedMLP,
    JoinedPart,
    added,
    as_packed_norm,
    is_gated_mlp,
    join,
    norm_width,
)
from logprobe.kernels.layers.rotary import Projections, rotate_and_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.forward.attention import CurrentStep
    from logprobe.engine.forward.proof import Reference
    from logprobe.engine.layers.forms import LayerForm

    Rotary = tuple[torch.Tensor, torch.Tensor]

LAYER_PARTS = {"self_attn", "mlp"}  # beside its norms
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
ATTENTION_PARTS = {*PROJECTIONS, "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
TRIAL_TOLERANCE = 1e-5  # of the largest number; two orders of summation differ by less


class FusedAttention(nn.Module):
    """Self-attention over the pool, its three projections joined into one."""

    def __init__(self, attention: Any, step: CurrentStep) -> None:
        super().__init__()
        linears = [getattr(attention, name) for name in PROJECTIONS]
        self.layer_idx: int = attention.layer_idx
        self.qkv_proj: Any = join(linears)
        for name, linear in zip(PROJECTIONS, linears, strict=True):
            setattr(self, name, JoinedPart(linear))
        self.o_proj = attention.o_proj
        # Each of as many numbers as it has weights: of a head, or of all heads together.
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.widths = [linear.out_features for linear in linears]
        self.key_dim: int = attention.head_dim
        self._kv_heads = self.widths[1] // self.key_dim
        self.rule = step.rules[self.layer_idx]
        self._step = step

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary) -> torch.Tensor:
        """(num_tokens, hidden size) and what to add, or nothing → (num_tokens, hidden size)."""
        plan = self._step.plan
        assert plan is not None, "a step runs under a plan"
        query, key, value = self._projected(x)
        pool = plan.pool.layer(self.layer_idx, self._by_head(key), self._by_head(value))
        query = rotate_and_store(Projections(query, key, value), *rotary, pool, plan.slots)
        attended = attend(plan, self.layer_idx, query, self.rule).flatten(1)
        out: torch.Tensor = (
            self.o_proj(attended) if residual is None else added(self.o_proj, attended, residual)
        )
        return out

    def _projected(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = list(self.qkv_proj(x).split(self.widths, dim=1))
        for name, part in zip(PROJECTIONS, parts, strict=True):
            getattr(self, name).add_lora_(part, x)
        for place, norm in enumerate((self.q_norm, self.k_norm)):
            if norm is not None:
                parts[place] = norm(parts[place].unflatten(1, (-1, norm_width(norm)))).flatten(1)
        return parts

    def _by_head(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(len(rows), self._kv_heads, -1)


class FusedLayer(nn.Module):
    """A decoder layer: attention and a feed-forward part, norms around each, a residual past each."""

    def __init__(self, layer: Any, step: CurrentStep, form: LayerForm = forms.USUAL_LAYER) -> None:
        super().__init__()
        self.form = form
        self.self_attn = FusedAttention(layer.self_attn, step)
        self.mlp = layer.mlp
        self._is_gated = isinstance(layer.mlp, GatedMLP) or is_gated_mlp(
            layer.mlp
        )  # else it may want the shape that transformers' layers have
        for name in form.norms:
            setattr(self, name, getattr(layer, name))

    def forward(self, hidden_states: torch.Tensor, *, position_embeddings: Rotary, **_: Any) -> torch.Tensor:
        """(1, num_tokens, hidden size) → the same."""
        hidden, form = hidden_states[0], self.form
        rotary = (position_embeddings[0][0], position_embeddings[1][0])
        normed = self._normed(form.before_attention, hidden)
        if form.after_attention is None:
            hidden = self.self_attn(normed, hidden, rotary)
        else:
            hidden = hidden + self._normed(form.after_attention, self.self_attn(normed, None, rotary))
        normed = self._normed(form.before_mlp, hidden)
        if self._is_gated and form.after_mlp is None:
            return added(self.mlp, normed, hidden)[None]
        return (hidden + self._normed(form.after_mlp, self.mlp(normed[None])[0]))[None]

    def _normed(self, name: str | None, x: torch.Tensor) -> torch.Tensor:
        return x if name is None else getattr(self, name)(x)


def fuse_(model: nn.Module, step: CurrentStep, references: Sequence[Reference]) -> None:
    """Replace the layers of a model that are of a known form; its attention must be the pool's by now."""
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for index, layer in enumerate(layers):
            if (form := known_form(layer)) is not None:
                fused = FusedLayer(layer, step, form)
                if all(_gives_the_same(fused, layer, step, reference) for reference in references):
                    layers[index] = fused


def known_form(layer: Any) -> LayerForm | None:
    """The form of a decoder layer whose parts and source were read; None for every other."""
    form = forms.layer_form(layer)
    if form is None or {name for name, _ in layer.named_children()} != LAYER_PARTS.union(form.norms):
        return None
    norms = (getattr(layer, name) for name in form.norms)
    return form if all(map(_is_known_norm, norms)) and _is_known_attention(layer.self_attn) else None


def _is_known_norm(norm: nn.Module) -> bool:
    return type(norm) is nn.LayerNorm or as_packed_norm(norm) is not None


def _is_known_attention(attention: Any) -> bool:
    parts = dict(attention.named_children())
    head_norms = [parts[name] for name in HEAD_NORMS & parts.keys()]
    forward = type(attention).forward
    return (
        parts.keys() - HEAD_NORMS == ATTENTION_PARTS
        and all(type(parts[name]) is nn.Linear for name in ATTENTION_PARTS)
        and all(as_packed_norm(norm) is not None for norm in head_norms)
        and forms.has_form(forward, forms.ATTENTION)
        and forms.calls_form(forward, "apply_rotary_pos_emb", forms.ROTATE_HALVES)
        and forms.calls_form(forward.__globals__["apply_rotary_pos_emb"], "rotate_half", forms.ROTATE_HALF)
        and getattr(attention, "use_rope", True)
    )


def _gives_the_same(fused: FusedLayer, layer: nn.Module, step: CurrentStep, reference: Reference) -> bool:
    """Whether a fused layer makes what the layer itself made of the rows that the model sent through it."""
    call = reference.layers[layer]
    rotary = call.options["position_embeddings"]
    hidden = call.args[0]
    if rotary[0].shape[2] != layer.self_attn.head_dim:  # type: ignore[union-attr]
        return False
    slots = torch.arange(hidden.shape[1])
    step.plan = AttentionPlan(KVPool(len(slots)), slots, [Chunk(0, len(slots), slots)], None)
    difference = (fused(hidden, position_embeddings=rotary) - call.output).abs().max()
    return bool(difference <= TRIAL_TOLERANCE * call.output.abs().max())
