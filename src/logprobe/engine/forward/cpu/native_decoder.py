"""Builds the native decoder of a model whose family and configuration are supported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.engine.forward.config import DecoderSpec, Rule
from logprobe.engine.forward.cpu.decoder import Decoder
from logprobe.engine.forward.families import FAMILIES
from logprobe.engine.forward.reference.model import decoder_name, head_name
from logprobe.engine.forward.reference.rotary import ORIGINAL_LEN, attention_factor
from logprobe.engine.forward.reference.rotary import frequencies as rotary_frequencies
from logprobe.engine.forward.reference.settings import settings_of
from logprobe.errors import UnsupportedModelError
from logprobe.models.sources import host_array

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from logprobe.engine.forward.proof import Proof
    from logprobe.engine.forward.reference.rotary import Rotary
    from logprobe.engine.forward.reference.settings import Settings
    from logprobe.kernels.arrays import Array
    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models.config_files import ModelConfig

    Vectors = dict[str, Array]

ROTARY: Final = "rotary_emb"  # transformers' name of the rotary embedding, relative to the decoder
EVERY_LAYER: Final = "every_layer"  # name of the frequencies if all layers share them
HEAD: Final = "lm_head"  # name of an output head that shares the embedding's weight


def describe(config: ModelConfig, names: Collection[str]) -> DecoderSpec | str:
    """Return the structure of a model's decoder, or the reason why it is not supported.

    Args:
        config: the model's configuration.
        names: names of the model's weights in transformers' module.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"the model type {config.model_type} is not supported"
    if unread := family.unread(config):
        return f"{', '.join(unread)} of its configuration is not supported"
    if config.use_bidirectional_attention:
        return "use_bidirectional_attention of its configuration is not supported"
    try:
        settings = settings_of(config)
        used = {_name(rotary): rotary for rotary in settings.rotary if rotary is not None}
        return DecoderSpec(
            family=config.model_type,
            path=decoder_name(names, family),
            head=head_name(names) or HEAD,
            head_dim=settings.head_dim,
            epsilon=settings.epsilon,
            activation=settings.activation,
            is_parallel=settings.is_parallel,
            factors=settings.factors,
            rules=[_effective(rule, config.max_position_embeddings) for rule in settings.rules],
            rotary=[None if rotary is None else _name(rotary) for rotary in settings.rotary],
            rotary_scaling={name: attention_factor(rotary) for name, rotary in used.items()},
            rope_boundary=_boundary(used.values()),
            experts_per_token=settings.experts_per_token,
            normalises_experts=settings.normalises_experts,
        )
    except UnsupportedModelError as error:
        return str(error)
    except (KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        return f"its structure is not supported ({type(error).__name__}: {error})"


def native_decoder(
    spec: DecoderSpec,
    names: Collection[str],
    vectors: Vectors,
    proof: Proof,
    panels: Mapping[str, PanelWeights],
) -> Decoder | str:
    """Return the native decoder of a model, or the reason why it cannot be used.

    Args:
        spec: structure of the decoder.
        names: names of the model's weights; the native decoder must use all that are in `spec.path` or
            `spec.head`.
        vectors: biases, norm weights and rotary frequencies by name.
        proof: verifies the decoder's logits.
        panels: packed matrices by module name.
    """
    own = {name for name in names if name.startswith((f"{spec.path}.", f"{spec.head}."))}
    try:
        decoder = Decoder(spec, vectors, panels)
    except (KeyError, ValueError) as error:
        return f"its structure is not supported ({type(error).__name__}: {error})"
    if unplaced := sorted(own - decoder.names):
        return f"its tensor {unplaced[0]} is not supported"
    try:
        proof.prove(decoder)
    except UnsupportedModelError as error:
        return f"the native decoder did not pass verification ({error})"
    return decoder


def vectors_of(module: Any, spec: DecoderSpec) -> Vectors:
    """Return copies of a transformers module's biases, norm weights and rotary frequencies, by name."""
    # Copied, because the module's tensors may be views that keep a whole file mapped.
    small = {
        name: np.array(host_array(tensor))
        for name, tensor in module.state_dict().items()
        if name.startswith((f"{spec.path}.", f"{spec.head}.")) and tensor.dim() == 1
    }
    return small | module_frequencies(module, spec)


def frequencies(settings: Settings, rope_boundary: int | None) -> Vectors:
    """Return rotary frequencies computed as transformers does, in float32, by name.

    The names are `inv_freq.<name>` and, with longrope, `long_inv_freq.<name>`.

    Args:
        settings: settings of the model, with float32 rotary embeddings.
        rope_boundary: see `DecoderSpec`.
    """
    vectors: Vectors = {}
    for rotary in settings.rotary:
        if rotary is None or f"inv_freq.{_name(rotary)}" in vectors:
            continue
        vectors[f"inv_freq.{_name(rotary)}"] = rotary_frequencies(rotary, 1)
        if rope_boundary is not None:
            vectors[f"long_inv_freq.{_name(rotary)}"] = rotary_frequencies(rotary, rope_boundary + 1)
    return vectors


def module_frequencies(module: Any, spec: DecoderSpec) -> Vectors:
    """Return the rotary frequencies in a transformers module; see `frequencies`."""
    import torch

    vectors: Vectors = {}
    for name in spec.rotary_scaling:
        embedding = module.get_submodule(f"{spec.path}.{ROTARY}")
        buffer, options = f"{_prefix(name)}inv_freq", {} if name == EVERY_LAYER else {"layer_type": name}
        vectors[f"inv_freq.{name}"] = np.array(host_array(getattr(embedding, buffer).float()))
        if spec.rope_boundary is not None:
            # A call with a position beyond the boundary selects the long frequencies; a call with position 0
            # restores the short ones.
            places = torch.tensor([[spec.rope_boundary]])
            embedding(places.float(), places, **options)
            vectors[f"long_inv_freq.{name}"] = np.array(host_array(getattr(embedding, buffer).float()))
            embedding(places.float(), torch.zeros_like(places), **options)
    return vectors


def _prefix(name: str) -> str:
    """Return the prefix of buffer names in the rotary embedding; empty if all layers share frequencies."""
    return "" if name == EVERY_LAYER else f"{name}_"


def _effective(rule: Rule, context_len: int | None) -> Rule:
    """Return the rule, without its sliding window if no text can exceed the window."""
    if rule.window is None or context_len is None or rule.window < context_len:
        return rule
    return Rule(rule.scale, None, rule.softcap)


def _name(rotary: Rotary) -> str:
    return rotary.name or EVERY_LAYER


def _boundary(embeddings: Collection[Rotary]) -> int | None:
    """Return the length in tokens of the longest text with short frequencies; None without longrope."""
    lengths = {
        int(rotary.number(ORIGINAL_LEN))
        for rotary in embeddings
        if rotary.parameters["rope_type"] == "longrope"
    }
    if len(lengths) > 1:
        raise ValueError("its layers change their rotary frequencies at different lengths")
    return next(iter(lengths), None)
