"""A proven model → the record that later loads build on, where every part of it is of a form that was read.

Before it: `follow`. After it: the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from logprobe.engine.layers.forms import USUAL_LAYER
from logprobe.engine.layers.fused import PROJECTIONS, FusedLayer
from logprobe.engine.layers.packed import SILU, PackedNorm
from logprobe.engine.layers.published import PublishedEmbedding, PublishedGatedMLP, PublishedLinear
from logprobe.engine.layers.source import has_form
from logprobe.engine.ready import forms
from logprobe.engine.ready.usual import DECODER, HEAD
from logprobe.models.stored.record import LoadRecord, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.engine.forward.proof import Proof
    from logprobe.engine.ready.model import ReadyModel

    Tensors = dict[str, torch.Tensor]

DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
KEPT_LOGITS = 2  # of each reference: its last tokens, which saw all others


def remember(ready: ReadyModel, proof: Proof, *, is_recorded: bool) -> tuple[LoadRecord, Tensors] | None:
    """The record of a model on published weights, and its tensors; None where some part was not read."""
    model: Any = ready.model
    if not is_usual(model, proof):
        return None
    decoder = model.get_submodule(DECODER)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, PackedNorm)}
    rules = [ready.step.rules[layer] for layer in range(len(decoder.layers))]
    record = LoadRecord(
        num_layers=len(decoder.layers),
        key_dim=decoder.layers[0].fused_attention.key_dim,
        context_len=ready.context_len,
        eos_token_ids=sorted(ready.eos_token_ids),
        rules=[Rule(rule.scale, rule.window) for rule in rules],
        epsilons={name: norm.epsilon for name, norm in norms.items()},
        rope_scaling=float(decoder.rotary_emb.attention_scaling),
        is_tied=model.lm_head.parts[0].data is decoder.embed_tokens.weights.data,
        probe_difference=ready.layout.probe_difference,
        num_references=len(proof.references),
        is_recorded=is_recorded,
    )
    tensors = {name: norm.factor.detach() for name, norm in norms.items()}
    tensors |= {"inv_freq": decoder.rotary_emb.inv_freq, **dict(_biases(model)), **_references(proof)}
    return record, tensors


def is_usual(model: Any, proof: Proof) -> bool:
    """Whether every part of a published model, and how they are put together, is of a form that was read."""
    if {name for name, _ in model.named_children()} != {DECODER, HEAD} or proof.place.path != DECODER:
        return False
    decoder = model.get_submodule(DECODER)
    return (
        proof.rope_boundary is None
        and has_form(type(model).forward, forms.HEAD)
        and has_form(type(decoder).forward, forms.DECODER)
        and {name for name, _ in decoder.named_children()} == DECODER_PARTS
        and _is_known_rotary(decoder.rotary_emb)
        and type(decoder.embed_tokens) is PublishedEmbedding
        and decoder.embed_tokens.factor == 1.0
        and type(model.lm_head) is PublishedLinear
        and type(decoder.norm) is PackedNorm
        and all(map(_is_usual_layer, decoder.layers))
    )


def _is_known_rotary(rotary: Any) -> bool:
    kind = getattr(rotary, "rope_type", None)
    return (
        isinstance(kind, str)
        and not any(word in kind for word in forms.CHANGING_ROTARY)
        and has_form(type(rotary).forward, forms.ROTARY)
    )


def _is_usual_layer(layer: Any) -> bool:
    if type(layer) is not FusedLayer or type(layer.mlp) is not PublishedGatedMLP:
        return False
    attention, rule = layer.fused_attention, layer.fused_attention.rule
    norms = [getattr(layer, name) for name in layer.form.norms]
    head_norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    return (
        layer.form is USUAL_LAYER
        and attention.form.projections == PROJECTIONS
        and attention.rotates
        and type(layer.mlp.act_fn).__name__ in SILU
        and all(type(norm) is PackedNorm for norm in (*norms, *head_norms))
        and all(type(linear) is PublishedLinear for linear in (attention.projection, attention.output))
        and rule.softcap is None
        and rule.sinks is None
    )


def _biases(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """By the names that the layers have in transformers' module."""
    for name, module in model.named_modules():
        if not isinstance(module, PublishedLinear) or all(part.bias is None for part in module.parts):
            continue
        parts = [torch.zeros(part.num_outputs) if part.bias is None else part.bias for part in module.parts]
        bias, parent = torch.cat(parts), name.rpartition(".")[0]
        if not name.endswith(".qkv_proj"):
            yield f"{name}.bias", bias
            continue
        widths = model.get_submodule(parent).widths
        for projection, part in zip(PROJECTIONS, torch.split(bias, widths), strict=True):
            yield f"{parent}.{projection}.bias", part


def _references(proof: Proof) -> Tensors:
    tensors: Tensors = {}
    for number, reference in enumerate(proof.references):
        tensors[f"reference.{number}.ids"] = torch.from_numpy(reference.token_ids)
        tensors[f"reference.{number}.positions"] = torch.from_numpy(reference.positions)
        tensors[f"reference.{number}.logits"] = reference.logits[-KEPT_LOGITS:]
    return tensors
