"""Decoder layers of known forms in few, large operations (CPU, float32).

A layer as Llama's, Gemma's, Phi's or GPT-2's runs as one product for queries, keys and values, one kernel
that rotates and stores them, attention, and products that add the residual themselves where no norm comes
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
from logprobe.engine.layers import attention_forms, forms
from logprobe.engine.layers.packed import (
    GatedMLP,
    JoinedPart,
    added,
    as_packed_norm,
    is_gated_mlp,
    is_joined_mlp,
    is_linear,
    join,
    norm_width,
    num_features,
    plain_mlp_form,
)
from logprobe.engine.layers.source import calls_form, form_of, parts_of
from logprobe.kernels.layers.rotary import Projections, rotate_and_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.forward.attention import CurrentStep
    from logprobe.engine.forward.proof import Reference
    from logprobe.engine.layers.attention_forms import AttentionForm
    from logprobe.engine.layers.forms import LayerForm

    Rotary = tuple[torch.Tensor, torch.Tensor]

PROJECTIONS = attention_forms.USUAL_ATTENTION.projections
HEAD_NORMS = {"q_norm", "k_norm"}
TRIAL_TOLERANCE = 1e-5  # of the largest number; two orders of summation differ by less


class FusedAttention(nn.Module):
    """Self-attention over the pool, its three projections joined into one; its parts keep their names."""

    def __init__(self, attention: Any, step: CurrentStep, form: AttentionForm) -> None:
        super().__init__()
        self.form = form
        linears = [getattr(attention, name) for name in form.projections]
        self.layer_idx: int = attention.layer_idx
        if len(linears) > 1:
            self._joined = form.projections
            self._product = "qkv_proj"
            self.qkv_proj: Any = join(linears)
            for name, linear in zip(form.projections, linears, strict=True):
                setattr(self, name, JoinedPart(linear))
        else:
            self._joined = ()
            [self._product] = form.projections
            setattr(self, self._product, linears[0])
        setattr(self, form.output, getattr(attention, form.output))
        # Each of as many numbers as it has weights: of a head, or of all heads together.
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.key_dim: int = getattr(attention, form.head_dim)
        query_width, _ = num_features(self.output)
        num_outputs = sum(num_features(linear)[1] for linear in linears)
        self.widths = [query_width, (num_outputs - query_width) // 2, (num_outputs - query_width) // 2]
        self.rotates: bool = form.rotates and getattr(attention, "use_rope", True)
        self.rule = step.rules[self.layer_idx]
        self._step = step

    @property
    def projection(self) -> Any:
        """The one layer of all three."""
        return getattr(self, self._product)

    @property
    def output(self) -> Any:
        """The layer after attention."""
        return getattr(self, self.form.output)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary) -> torch.Tensor:
        """(num_tokens, hidden size) and what to add, or nothing → (num_tokens, hidden size)."""
        plan = self._step.plan
        assert plan is not None, "a step runs under a plan"
        projections = self._projected(x)
        pool = plan.pool.layer(self.layer_idx, projections.key, projections.value)
        query = rotate_and_store(projections, *rotary, pool, plan.slots)
        attended = attend(plan, self.layer_idx, query, self.rule).flatten(1)
        out: torch.Tensor = (
            self.output(attended) if residual is None else added(self.output, attended, residual)
        )
        return out

    def by_head(self, projected: Any) -> Projections:
        """Views of what the one product gave, (num_tokens, sum of widths)."""
        if self.form.is_by_head:
            return Projections(*projected.unflatten(1, (-1, 3, self.key_dim)).unbind(2))
        return Projections(*(part.unflatten(1, (-1, self.key_dim)) for part in self.split(projected)))

    def split(self, projected: torch.Tensor) -> tuple[Any, ...]:
        """Queries, keys and values where all heads of one follow each other."""
        return torch.split(projected, self.widths, dim=1)

    def _projected(self, x: torch.Tensor) -> Projections:
        projected = self.projection(x)
        for name, part in zip(self._joined, self.split(projected), strict=False):
            getattr(self, name).add_lora_(part, x)
        found = self.by_head(projected)
        if self.q_norm is None and self.k_norm is None:
            return found
        query, key = (
            part if norm is None else _by_width(norm, part)
            for norm, part in ((self.q_norm, found.query), (self.k_norm, found.key))
        )
        return Projections(query, key, found.value)


def _by_width(norm: Any, part: torch.Tensor) -> torch.Tensor:
    """A norm of each head, or of all heads together."""
    normed: torch.Tensor = norm(part.reshape(len(part), -1, norm_width(norm)))
    return normed.view(part.shape)


class FusedLayer(nn.Module):
    """A decoder layer: attention and a feed-forward part, norms around each, a residual past each."""

    def __init__(
        self,
        layer: Any,
        step: CurrentStep,
        form: LayerForm = forms.USUAL_LAYER,
        attention: AttentionForm = attention_forms.USUAL_ATTENTION,
    ) -> None:
        super().__init__()
        self.form = form
        setattr(self, form.attention, FusedAttention(getattr(layer, form.attention), step, attention))
        self.mlp = layer.mlp
        # Any other may want the shape that transformers' layers have.
        self._takes_rows = isinstance(layer.mlp, GatedMLP) or _is_known_mlp(layer.mlp)
        self.is_parallel = getattr(layer, "use_parallel_residual", False)
        for name in form.norms:
            setattr(self, name, getattr(layer, name))

    @property
    def fused_attention(self) -> FusedAttention:
        """The attention, whatever transformers calls it."""
        found: FusedAttention = getattr(self, self.form.attention)
        return found

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, position_embeddings: Rotary | None = None, **__: Any
    ) -> torch.Tensor:
        """(1, num_tokens, hidden size) → the same."""
        before, form = hidden_states[0], self.form
        normed = self._normed(form.before_attention, before)
        attention, rotary = self.fused_attention, self._rotary(position_embeddings, before)
        if form.after_attention is None:
            hidden: torch.Tensor = attention(normed, before, rotary)
        else:
            hidden = before + self._normed(form.after_attention, attention(normed, None, rotary))
        normed = self._normed(form.before_mlp, before if self.is_parallel else hidden)
        if self._takes_rows and form.after_mlp is None:
            return added(self.mlp, normed, hidden)[None]
        return (hidden + self._normed(form.after_mlp, self.mlp(normed[None])[0]))[None]

    def _rotary(self, embeddings: Rotary | None, hidden: torch.Tensor) -> Rotary:
        if embeddings is None or not self.fused_attention.rotates:
            nothing = torch.empty(len(hidden), 0)
            return nothing, nothing
        return embeddings[0][0], embeddings[1][0]

    def _normed(self, name: str | None, x: torch.Tensor) -> torch.Tensor:
        if name is None:
            return x
        normed: torch.Tensor = getattr(self, name)(x)
        return normed


def fuse_(model: nn.Module, step: CurrentStep, references: Sequence[Reference]) -> None:
    """Replace the layers of a model that are of a known form; its attention must be the pool's by now."""
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for index, layer in enumerate(layers):
            if (known := known_form(layer)) is not None:
                fused = FusedLayer(layer, step, *known)
                if all(_gives_the_same(fused, layer, step, reference) for reference in references):
                    layers[index] = fused


def known_form(layer: Any) -> tuple[LayerForm, AttentionForm] | None:
    """The forms of a decoder layer whose parts and source were read; None for every other."""
    form = form_of(layer, forms.LAYERS)
    if form is None or parts_of(layer).keys() != {form.attention, "mlp", *form.norms}:
        return None
    norms = (getattr(layer, name) for name in form.norms)
    attention = _known_attention(getattr(layer, form.attention))
    return (form, attention) if all(map(_is_known_norm, norms)) and attention is not None else None


def _is_known_norm(norm: nn.Module) -> bool:
    return type(norm) is nn.LayerNorm or as_packed_norm(norm) is not None


def _is_known_mlp(mlp: nn.Module) -> bool:
    return is_gated_mlp(mlp) or is_joined_mlp(mlp) or plain_mlp_form(mlp) is not None


def _known_attention(attention: Any) -> AttentionForm | None:
    form = form_of(attention, attention_forms.ATTENTION)
    if form is None:
        return None
    parts = parts_of(attention)
    head_norms = [parts.pop(name) for name in HEAD_NORMS & parts.keys()]
    forward = type(attention).forward
    is_known = (
        parts.keys() == {*form.projections, form.output}
        and all(map(is_linear, parts.values()))
        and all(as_packed_norm(norm) is not None for norm in head_norms)
        and (not form.rotates or _rotates_halves(forward))
    )
    return form if is_known else None


def _rotates_halves(forward: Any) -> bool:
    return calls_form(forward, "apply_rotary_pos_emb", attention_forms.ROTATE_HALVES) and calls_form(
        forward.__globals__["apply_rotary_pos_emb"], "rotate_half", attention_forms.ROTATE_HALF
    )


def _gives_the_same(fused: FusedLayer, layer: nn.Module, step: CurrentStep, reference: Reference) -> bool:
    """Whether a fused layer makes what the layer itself made of the rows that the model sent through it."""
    call = reference.layers[layer]
    rotary = call.options.get("position_embeddings")
    hidden = call.args[0]
    if fused.fused_attention.rotates and (
        rotary is None or rotary[0].shape[2] > fused.fused_attention.key_dim
    ):
        return False
    slots = torch.arange(hidden.shape[1])
    step.plan = AttentionPlan(KVPool(len(slots)), slots, [Chunk(0, len(slots), slots)], None)
    difference = (fused(hidden, position_embeddings=rotary) - call.output).abs().max()
    return bool(difference <= TRIAL_TOLERANCE * call.output.abs().max())
