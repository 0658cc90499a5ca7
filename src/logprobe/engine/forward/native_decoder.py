"""Builds the native decoder from a transformers model whose family and configuration are supported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from logprobe.engine.forward.config import DecoderSpec, Rule
from logprobe.engine.forward.decoder import Decoder
from logprobe.engine.forward.families import ACTIVATIONS, FAMILIES
from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logprobe.engine.forward.families import Family
    from logprobe.engine.forward.proof import Proof
    from logprobe.kernels.layers.forms import PanelWeights

    Tensors = dict[str, torch.Tensor]

ROTARY = "rotary_emb"  # transformers' name of the rotary embedding, relative to the decoder
EVERY_LAYER = "every_layer"  # name of the frequencies if all layers share them


def describe(module: Any, proof: Proof) -> DecoderSpec | str:
    """Return the configuration of a model's decoder, or the reason why it is not supported."""
    config = module.config.get_text_config(decoder=True)
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"the model type {config.model_type} is not supported"
    if unread := family.unread(config):
        return f"{', '.join(unread)} of its configuration is not supported"
    if (activation := ACTIVATIONS.get(getattr(config, family.activation))) is None:
        return f"{family.activation} of its configuration is not supported"
    rules = [rule for _, rule in sorted(proof.step.rules.items())]
    if any(rule.sinks is not None for rule in rules):
        return "its attention uses sinks"
    try:
        rotary, scaling = _rotary(module, proof, family)
        return DecoderSpec(
            family=config.model_type,
            path=_decoder_path(module, family, len(rules)),
            head=_head_name(module),
            head_dim=proof.step.key_dims[0],
            epsilon=getattr(config, family.epsilon) if isinstance(family.epsilon, str) else family.epsilon,
            activation=activation,
            is_parallel=family.is_parallel(config),
            factors=family.factors(config),
            rules=[Rule(rule.scale, rule.window, rule.softcap) for rule in rules],
            rotary=rotary,
            rotary_scaling=scaling,
            rope_boundary=proof.rope_boundary,
            experts_per_token=0 if family.experts is None else config.num_experts_per_tok,
            normalises_experts=family.experts is not None and family.experts.normalises(config),
        )
    except (KeyError, AttributeError, TypeError) as error:
        return f"its structure is not supported ({type(error).__name__}: {error})"


def native_decoder(
    spec: DecoderSpec, module: Any, proof: Proof, panels: Mapping[str, PanelWeights]
) -> Decoder | str:
    """Return the native decoder of a model, or the reason why it cannot be used.

    Args:
        spec: structure of the decoder.
        module: the transformers model.
        proof: verifies the decoder against the model's logits.
        panels: packed matrices by module name.
    """
    state = {
        name: tensor.detach()
        for name, tensor in module.state_dict().items()
        if name.startswith((f"{spec.path}.", f"{spec.head}."))
    }
    # Copy, because the module's tensors may be views that keep a whole file mapped.
    small = {name: tensor.clone() for name, tensor in state.items() if tensor.dim() == 1}
    try:
        decoder = Decoder(spec, small | frequencies(module, spec), panels)
    except (KeyError, ValueError, AttributeError, TypeError, RuntimeError) as error:
        return f"its structure is not supported ({type(error).__name__}: {error})"
    if unplaced := sorted(state.keys() - decoder.names):
        return f"its tensor {unplaced[0]} is not supported"
    try:
        proof.prove(decoder)
    except (UnsupportedModelError, RuntimeError, IndexError) as error:
        return f"the native decoder did not pass verification ({error})"
    return decoder


def _decoder_path(module: Any, family: Family, num_layers: int) -> str:
    """Return the module name of the decoder, which multimodal models nest deeper than others."""
    for path, part in module.named_modules():
        if hasattr(part, family.embedding) and len(getattr(part, family.layers, ())) == num_layers:
            return str(path)
    raise KeyError(f"{family.embedding} with {family.layers}")


def _head_name(module: Any) -> str:
    head = module.get_output_embeddings()
    names: dict[Any, str] = {part: name for name, part in module.named_modules()}
    return names[head]


def _rotary(module: Any, proof: Proof, family: Family) -> tuple[list[str | None], dict[str, float]]:
    """Return the rotary settings of a model.

    Returns:
        For each layer, the name of its rotary frequencies (None: no rotary embedding); and by name, the
        factor by which cosines and sines are multiplied.
    """
    config = module.config.get_text_config(decoder=True)
    layers = range(len(proof.step.rules))
    rotates = [family.rotates(config, layer) for layer in layers]
    if not any(rotates):
        return [None for _ in layers], {}
    embedding = _rotary_embedding(module, _decoder_path(module, family, len(layers)))
    is_shared = hasattr(embedding, "inv_freq")
    rotary = [
        None if not rotates[layer] else EVERY_LAYER if is_shared else str(config.layer_types[layer])
        for layer in layers
    ]
    names = {name for name in rotary if name is not None}
    return rotary, {name: float(getattr(embedding, f"{_prefix(name)}attention_scaling")) for name in names}


def frequencies(module: Any, spec: DecoderSpec) -> Tensors:
    """Return the rotary frequencies of a model, by tensor name.

    These are `inv_freq.<name>` and, with longrope, `long_inv_freq.<name>`.
    """
    tensors: Tensors = {}
    for name in spec.rotary_scaling:
        embedding = _rotary_embedding(module, spec.path)
        buffer, options = f"{_prefix(name)}inv_freq", {} if name == EVERY_LAYER else {"layer_type": name}
        tensors[f"inv_freq.{name}"] = getattr(embedding, buffer).float().clone()
        if spec.rope_boundary is not None:
            # A call with a position beyond the boundary selects the long frequencies; a call with position 0
            # restores the short ones.
            places = torch.tensor([[spec.rope_boundary]])
            embedding(places.float(), places, **options)
            tensors[f"long_inv_freq.{name}"] = getattr(embedding, buffer).float().clone()
            embedding(places.float(), torch.zeros_like(places), **options)
    return tensors


def _rotary_embedding(module: Any, path: str) -> Any:
    return module.get_submodule(f"{path}.{ROTARY}")


def _prefix(name: str) -> str:
    """Return the prefix of buffer names in the rotary embedding; empty if all layers share frequencies."""
    return "" if name == EVERY_LAYER else f"{name}_"
