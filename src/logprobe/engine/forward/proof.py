"""Verify at load that the engine's forward pass gives the same logits as the transformers model.

The transformers model runs short texts at its first and last positions, and across every length at which its
rotary frequencies may change. Then the engine runs the same texts through every attention path, packed into
one step, whole and with the first part of each text in the KV cache. The logits must agree.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AttentionInterface

from logprobe.engine.forward import attention, masks
from logprobe.engine.forward.attention import CurrentStep, pooled_attention
from logprobe.engine.forward.rope import original_lengths, rope_boundary
from logprobe.engine.forward.transformers_decoder import WatchedRun
from logprobe.errors import UnsupportedModelError, in_one_line
from logprobe.models.lazy import LOAD_ELSEWHERE

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from logprobe.engine.forward.cuda.decoder import CudaDecoder
    from logprobe.engine.forward.decoder import Decoder
    from logprobe.engine.forward.kv_cache import KVPool
    from logprobe.engine.forward.transformers_decoder import DecoderPlace, TransformersDecoder
    from logprobe.models.lazy import LazyModel

    AnyDecoder = Decoder | TransformersDecoder | CudaDecoder

NUM_TOKENS = 12
# transformers' names of the supported layer types. Layers of other types select or compress their context,
# some only in texts longer than those that run here.
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Relative to the largest logit. Another order of summation causes far smaller differences, and a wrong
# formula far larger ones.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}

AttentionInterface.register(attention.NAME, pooled_attention)


@dataclass(frozen=True, slots=True)
class Reference:
    """Logits of some tokens, computed by the transformers model."""

    token_ids: NDArray[np.int64]  # (num_tokens,)
    positions: NDArray[np.int64]  # (num_tokens,)
    logits: torch.Tensor  # (num_tokens, vocabulary) float32
    is_long: bool


class Proof:
    """Runs a transformers model to get reference logits, and compares decoders' logits with them."""

    def __init__(self, model: LazyModel, *, context_len: int) -> None:
        """Run the model with transformers, and record its logits and the arguments of its attention calls.

        Raises:
            UnsupportedModelError: the model has layers or masks that are not supported.
        """
        self._lazy, self.model = model, model.module
        self.step = CurrentStep()
        self.context_len = context_len
        self.rope_boundary = rope_boundary(self.model)
        self.largest_difference = 0.0  # nats; of the last `prove`
        self.place: DecoderPlace
        self._check_layer_types()
        self.references = self._references()
        self.step.reach(self.model)
        self._learn_rules()

    def prove(self, decoder: AnyDecoder, *, tolerance: float | None = None) -> KVPool:
        """Compare a decoder's logits with the reference on every attention path.

        Args:
            decoder: the decoder to verify.
            tolerance: maximum difference, relative to the largest logit; None: the default for the dtype.

        Returns:
            A KV cache that the decoder has filled.

        Raises:
            UnsupportedModelError: the logits differ by more than `tolerance`.
        """
        self.largest_difference = 0.0
        self._tolerance = TOLERANCE[self.model.dtype] if tolerance is None else tolerance
        pools = [
            self._prove_together(decoder, references)
            for is_long in (False, True)
            if (references := [one for one in self.references if one.is_long == is_long])
        ]
        return pools[0]

    def _prove_together(self, decoder: AnyDecoder, references: list[Reference]) -> KVPool:
        """Run references that all use the short or all the long rotary frequencies, packed into one step."""
        lengths = [len(reference.token_ids) for reference in references]
        pool = decoder.new_pool(sum(lengths))
        decoder.record_on(pool, max(lengths))
        prompts = list(torch.split(torch.arange(sum(lengths), device=decoder.device), lengths))
        plan: Any  # `AttentionPlan` or `SpanPlan`, as the decoder needs
        for starts, plan in decoder.all_plans(pool, prompts):
            pairs = list(zip(references, starts, strict=True))
            hidden = decoder(
                np.concatenate([reference.token_ids[start:] for reference, start in pairs]),
                np.concatenate([reference.positions[start:] for reference, start in pairs]),
                plan,
                is_long=references[0].is_long,
            )
            expected = torch.cat([reference.logits[start:] for reference, start in pairs])
            self._compare(decoder.head(hidden).to(expected.device), expected)
        return pool

    def _compare(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        if expected.isnan().any() or not torch.isfinite(expected).any():
            raise UnsupportedModelError("its logits in transformers are not finite")
        is_finite = torch.isfinite(expected)  # some families mask padding entries of the vocabulary
        scale = expected[is_finite].abs().max()
        difference = float((logits - expected)[is_finite].abs().max() / scale)
        if not difference <= self._tolerance:
            raise UnsupportedModelError(self._why_not(difference))
        nats = (logits.log_softmax(-1) - expected.log_softmax(-1))[is_finite].abs().max()
        self.largest_difference = max(self.largest_difference, float(nats))

    def _why_not(self, difference: float) -> str:
        forward = self.model.get_submodule(self.place.path).forward
        if "position_ids" not in inspect.signature(forward).parameters:
            return "its decoder takes no position_ids, so a step cannot mix texts"
        return f"the engine's logits differ from those of transformers (relative difference {difference:.1e})"

    def _starts(self) -> list[int]:
        """Return the start positions of the texts: the first, the last that fits, and one per boundary.

        A boundary is a length at which the rotary frequencies may change.
        """
        last = self.context_len - NUM_TOKENS
        across = {length - NUM_TOKENS // 2 for length in original_lengths(self.model)}
        if self.rope_boundary is not None:
            across.add(self.rope_boundary - NUM_TOKENS)  # the last positions with short frequencies
        return sorted({0, max(last, 0), *(start for start in across if 0 < start < last)})

    def _references(self) -> list[Reference]:
        """Run one text per start position; the text at position 0 runs without explicit position ids."""
        others = [start for start in self._starts() if start]
        short, long = ([one for one in others if self._is_long(one) == is_long] for is_long in (False, True))
        return [reference for starts in ([0], short, long) if starts for reference in self._run(starts)]

    def _is_long(self, start: int) -> bool:
        return self.rope_boundary is not None and start + self._count > self.rope_boundary

    @property
    def _count(self) -> int:
        return min(NUM_TOKENS, self.context_len)

    def _run(self, starts: list[int]) -> list[Reference]:
        """Run a batch of the transformers model with one text per start position."""
        ids = np.stack([_probe_ids(self.model, self._count, seed=start) for start in starts])
        positions = np.array(starts)[:, None] + np.arange(self._count)
        inputs = {"input_ids": torch.from_numpy(ids).to(self.model.device)}
        if starts != [0]:
            inputs["position_ids"] = torch.from_numpy(positions).to(self.model.device)
        with WatchedRun(self.model) as watched, self._lazy.reading():
            logits = self.model(**inputs, use_cache=False).logits.float()
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


def _probe_ids(model: Any, count: int, *, seed: int) -> NDArray[np.int64]:
    """Return `count` reproducible random token ids, without special ids such as padding or image tokens."""
    config = model.config.get_text_config(decoder=True)
    special = {
        value
        for source in (model.config, config)
        for name, value in source.to_dict().items()
        if name.endswith("token_id") and isinstance(value, int)
    }
    order = np.random.default_rng(seed).permutation(config.vocab_size)
    return np.array(
        [token_id for token_id in order[: count + len(special)] if token_id not in special][:count]
    )
