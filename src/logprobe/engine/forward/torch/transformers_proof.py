"""`TransformersProof`: verifies decoders against the logits of the transformers model."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import transformers
from transformers import AttentionInterface

from logprobe.engine.forward.config import Rule
from logprobe.engine.forward.cpu.native_decoder import describe
from logprobe.engine.forward.families import FAMILIES
from logprobe.engine.forward.proof import Proof, Reference, special_ids
from logprobe.engine.forward.rope import original_lengths, rope_boundary
from logprobe.engine.forward.torch import masks
from logprobe.engine.forward.torch.transformers_attention import NAME, CurrentStep, pooled_attention
from logprobe.engine.forward.torch.transformers_decoder import WatchedRun
from logprobe.errors import UnsupportedModelError, in_one_line
from logprobe.models.config_files import parse_config
from logprobe.models.lazy import LOAD_ELSEWHERE
from logprobe.models.sources import host_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.engine.forward.config import DecoderSpec
    from logprobe.engine.forward.torch.transformers_decoder import DecoderPlace
    from logprobe.models.lazy import LazyModel

# transformers' names of the supported layer types. Layers of other types select or compress their context,
# some only in texts longer than those that run here.
LAYER_TYPES = {"full_attention", "sliding_attention"}

AttentionInterface.register(NAME, pooled_attention)


class TransformersProof(Proof):
    """Runs a transformers model to get reference logits."""

    place: DecoderPlace

    def __init__(self, model: LazyModel) -> None:
        """Run the model with transformers, and record its logits and the arguments of its attention calls.

        Raises:
            UnsupportedModelError: the model has layers or masks that are not supported.
        """
        self._lazy, self.model = model, model.module
        self.verified_against = f"transformers {transformers.__version__}"
        self.step = CurrentStep()
        text = self.model.config.get_text_config(decoder=True)
        super().__init__(
            context_len=_context_len(text),
            rope_boundary=rope_boundary(self.model),
            dtype=str(self.model.dtype).removeprefix("torch."),
            vocab_size=text.vocab_size,
            eos_token_ids=_eos_token_ids(self.model),
        )
        self._check_layer_types()
        self.references = self._references()
        self.step.reach(self.model)
        self._learn_rules()

    def _why_not(self, difference: float) -> str:
        forward = self.model.get_submodule(self.place.path).forward
        if "position_ids" not in inspect.signature(forward).parameters:
            return "its decoder takes no position_ids, so a step cannot mix texts"
        return super()._why_not(difference)

    def _references(self) -> list[Reference]:
        """Run one text per start position; the text at position 0 runs without explicit position ids."""
        others = [start for start in self._starts(original_lengths(self.model)) if start]
        short, long = ([one for one in others if self._is_long(one) == is_long] for is_long in (False, True))
        return [reference for starts in ([0], short, long) if starts for reference in self._run(starts)]

    def _run(self, starts: list[int]) -> list[Reference]:
        """Run a batch of the transformers model with one text per start position."""
        config = self.model.config
        special = special_ids(config.to_dict(), config.get_text_config(decoder=True).to_dict())
        ids = np.stack([self._probe_ids(special, seed=start) for start in starts])
        positions = np.array(starts)[:, None] + np.arange(self._count)
        inputs = {"input_ids": torch.from_numpy(ids).to(self.model.device)}
        if starts != [0]:
            inputs["position_ids"] = torch.from_numpy(positions).to(self.model.device)
        with WatchedRun(self.model) as watched, self._lazy.reading():
            logits = host_array(self.model(**inputs, use_cache=False).logits.float())
        self.place = watched.place
        return [
            Reference(*of_one, self._is_long(start))
            for start, of_one in zip(starts, zip(ids, positions, logits, strict=True), strict=True)
        ]

    def _check_layer_types(self) -> None:
        kinds = getattr(self.model.config.get_text_config(decoder=True), "layer_types", None) or ()
        unknown = sorted(set(kinds) - LAYER_TYPES)
        if unknown:
            raise UnsupportedModelError(f"its layer types are not supported: {', '.join(unknown)}")

    def _learn_rules(self) -> None:
        """Set each layer's score rule and sliding window, read from the layer's attention call."""
        self.model.set_attn_implementation(masks.NAME)
        self.step.masks.clear()
        first = self.references[0]
        ids = torch.from_numpy(first.token_ids)[None].to(self.model.device)
        with self._lazy.reading(has_numbers=False):
            self.model(input_ids=ids, use_cache=False)
        config = self.model.config.get_text_config(decoder=True)
        num_layers = getattr(config, "decoder_layers", config.num_hidden_layers)
        if len(self.step.masks) != num_layers:
            raise UnsupportedModelError(_other_layers(len(self.step.masks), num_layers))
        self.step.windows = {
            layer: masks.window_of(mask, self.context_len) for layer, mask in self.step.masks.items()
        }
        self.step.masks.clear()
        for layer, window in self.step.windows.items():
            self.step.rules[layer] = replace(self.step.rules[layer], window=window)


def described(module: Any, proof: TransformersProof) -> DecoderSpec | str:
    """Return the structure of a transformers module's decoder, or the reason why it is not supported.

    The structure follows from the configuration, and must agree with the module's attention calls.
    """
    config = module.config.get_text_config(decoder=True)
    if config.model_type not in FAMILIES:
        return f"the model type {config.model_type} is not supported"
    try:
        own = parse_config(config.to_dict())
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        return f"its configuration is not supported ({in_one_line(error)})"
    spec = describe(own, module.state_dict().keys())
    if isinstance(spec, str):
        return spec
    rules = [rule for _, rule in sorted(proof.step.rules.items())]
    if any(rule.sinks is not None for rule in rules):
        return "its attention uses sinks"
    observed = [Rule(rule.scale, rule.window, rule.softcap) for rule in rules]
    facts = (observed, proof.rope_boundary, proof.step.key_dims[0])
    if facts != (spec.rules, spec.rope_boundary, spec.head_dim):
        return "transformers reads its configuration differently"
    return spec


def refusing(model: Any, act: Callable[[], Any]) -> Any:
    """Return `act()`; convert any error to an `UnsupportedModelError` that names the model and the cause."""
    name = type(model).__name__
    try:
        return act()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{name} cannot run on the native engine: {error}; {LOAD_ELSEWHERE}"
        ) from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} cannot run on the native engine: its code raised an error ({in_one_line(error)}); "
            f"{LOAD_ELSEWHERE}"
        ) from error


def _other_layers(num_attending: int, num_layers: int) -> str:
    if not num_attending:
        return "none of its layers uses transformers' attention interface"
    return (
        f"only {num_attending} of its {num_layers} layers use transformers' attention interface (the others "
        "may have a recurrent state)"
    )


def _context_len(config: Any) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise UnsupportedModelError(
            "it has no max_position_embeddings (it may have a recurrent state, or ALiBi)"
        )
    return length


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Return all end-of-sequence ids in the model's configuration."""
    ids: set[int | None] = set()
    for source in (model.generation_config, model.config):
        named = getattr(source, "eos_token_id", None)
        ids.update(named if isinstance(named, list) else [named])
    return frozenset(ids) - {None}  # type: ignore[return-value]
