"""The native forward pass: one step's packed tokens through the transformers model.

Before it: the scheduler's plan. After it: hidden rows in their slots, which the output head reads.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutputWithPast

from logprobe.engine.forward.attention import (
    NAME,
    AttentionPlan,
    Chunk,
    every_way,
    plan_attention,
    pooled_attention,
)
from logprobe.engine.forward.lora import Loras
from logprobe.engine.forward.pool import KVPool, SlotMemory
from logprobe.engine.layers.fused import fuse_
from logprobe.engine.layers.int8 import CALIBRATION_TEXT, quantise_
from logprobe.engine.layers.packed import choose_layout, pack_
from logprobe.engine.layers.published import publish_
from logprobe.engine.layers.recorded import RecordedSteps, record_steps
from logprobe.errors import ParameterError, UnsupportedModelError
from logprobe.models import load_model, load_panels, load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.config import EngineConfig
    from logprobe.engine.protocol import StepBatch
    from logprobe.models import ModelFiles
    from logprobe.records.values import IntArray


class _GivenRows(nn.Module):
    """Stands where the decoder stood."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> BaseModelOutputWithPast:
        """Return the rows as they came."""
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class OutputHead:
    """Callable: (rows, hidden size) → (rows, vocabulary) float32 logits, scale and soft cap included."""

    def __init__(self, model: Any) -> None:
        self._model = copy.copy(model)
        # A shallow copy shares the dictionary of submodules; this one gets its own.
        self._model._modules = {**model._modules, model.base_model_prefix: _GivenRows()}  # noqa: SLF001

    def __call__(self, hidden: Tensor) -> Tensor:
        """Give (rows, vocabulary) float32 logits for (rows, hidden size)."""
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()


DEFAULT_KV_BYTES = 1 << 30
PROBE_TOKENS = 6
RECORDED_TOLERANCE = 1e-5  # of the largest number; the integers are the same
# Relative to the largest logit: two orders of summation differ by far less, another formula by far more.
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}

AttentionInterface.register(NAME, pooled_attention)


class NativeForward:
    """Owns the model, the key/value pool and the hidden rows, all by slot."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self.device = _choose_device(config.device)
        dtype = _choose_dtype(config.dtype, self.device)
        self.model = load_model(files, dtype=dtype, device=self.device)
        text_config = self.model.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.context_len: int = text_config.max_position_embeddings
        self.dtype: torch.dtype = self.model.dtype
        self.weights = choose_layout(self.model, config.weights)
        self._files = files
        probe = self._probe()
        if self.weights == "int8":
            self._quantise(files)
        self.head = OutputHead(self.model)
        self.loras = Loras(self.model)
        slot_bytes = probe.bytes_per_slot + text_config.hidden_size * self.dtype.itemsize
        kv_bytes = config.kv_bytes or DEFAULT_KV_BYTES
        self.num_slots = kv_bytes // slot_bytes
        if self.num_slots < 2:
            raise ParameterError(
                "kv_bytes", f"one token takes {slot_bytes} bytes; give room for more of them"
            )
        self._memory = _reserve(kv_bytes) if self.device == "cpu" else None
        self.pool = KVPool(self.num_slots)
        self.pool.make_like(probe, self._new_zeros)
        self.hidden = self._new_zeros((self.num_slots, text_config.hidden_size))
        self.recorded = self._record()

    def _new_zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self._memory is not None:
            return self._memory.take(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> None:
        """Run a step's tokens; their keys, values and last hidden states land in their slots."""
        if not len(batch.token_ids):
            return
        attention = plan_attention(self.pool, batch, self.device)
        self.loras.select(batch)
        recorded = None if self.loras.are_running else self.recorded
        if recorded is not None and recorded.can_run(attention):
            hidden = recorded.run(batch.token_ids, batch.positions, attention)
        else:
            hidden = self._forward(batch.token_ids, batch.positions, attention)
        self.hidden.index_copy_(0, attention.slots, hidden)

    @torch.inference_mode()
    def hidden_rows(self, slots: IntArray) -> torch.Tensor:
        """The last hidden states of the tokens in `slots`, (len(slots), hidden size)."""
        return self.hidden.index_select(0, torch.from_numpy(slots.astype(np.int64)).to(self.device))

    def _forward(self, token_ids: Any, positions: Any, attention: AttentionPlan) -> torch.Tensor:
        out = self.model.base_model(
            input_ids=torch.from_numpy(token_ids.astype(np.int64))[None].to(self.device),
            position_ids=torch.from_numpy(positions.astype(np.int64))[None].to(self.device),
            use_cache=False,
            logprobe_plan=attention,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def _record(self) -> RecordedSteps | None:
        """Steps of few rows as one launch, where that gives the numbers of the layers one by one."""
        recorded = record_steps(self.model.base_model, self.pool, min(self.num_slots, self.context_len))
        if recorded is None:
            return None
        token_ids = positions = np.arange(min(PROBE_TOKENS, self.num_slots))
        for start, plan in every_way(self.pool, torch.from_numpy(positions)):
            own = self._forward(token_ids[start:], positions[start:], plan)
            if recorded.can_run(plan):
                hidden = recorded.run(token_ids[start:], positions[start:], plan)
                if not torch.allclose(hidden, own, rtol=0, atol=RECORDED_TOLERANCE * float(own.abs().max())):
                    return None
        return recorded

    @torch.inference_mode()
    def _quantise(self, files: ModelFiles) -> None:
        """Turn the weights to 8 bits, calibrated by the plain forward pass on a short text."""
        token_ids = np.array(load_tokenizer(files).encode(CALIBRATION_TEXT)[: self.context_len])
        positions = np.arange(len(token_ids))
        slots = torch.from_numpy(positions)
        plan = AttentionPlan(KVPool(len(slots)), slots, [Chunk(0, len(slots), slots)], None)
        quantise_(self.model.base_model, lambda: self._forward(token_ids, positions, plan))
        pack_(self.model)

    @torch.inference_mode()
    def _probe(self) -> KVPool:
        """Prove on a short prompt that pool, attention and head give the model's own logits.

        Returns:
            The pool of the probe: what every layer stores for a token.

        Raises:
            UnsupportedModelError: the model does not use the attention interface, or the numbers differ.
        """
        name = type(self.model).__name__
        token_ids, positions = np.arange(PROBE_TOKENS) % self.vocab_size, np.arange(PROBE_TOKENS)
        expected = self.model(input_ids=torch.from_numpy(token_ids)[None].to(self.device), use_cache=False)
        own = expected.logits[0].float()
        self.model.set_attn_implementation(NAME)
        pool = KVPool(PROBE_TOKENS)
        try:
            self._arrange()
            for start, plan in every_way(pool, torch.arange(PROBE_TOKENS, device=self.device)):
                hidden = self._forward(token_ids[start:], positions[start:], plan)
                self._check_logits(hidden, own[start:])
        except (TypeError, KeyError) as error:
            raise UnsupportedModelError(f"{name} does not hand options to its attention: {error}") from error
        if len(pool.keys) != self.model.config.get_text_config().num_hidden_layers:
            raise UnsupportedModelError(
                f"{name}: only {len(pool.keys)} of its layers use transformers' attention interface"
            )
        return pool

    def _arrange(self) -> None:
        """Put faster modules in the places of the model's own, for the probe to prove."""
        if self.weights != "plain":
            fuse_(self.model)
        if self.weights == "packed":
            pack_(self.model)
        elif self.weights == "published":
            publish_(self.model, load_panels(self._files))

    def _check_logits(self, hidden: torch.Tensor, own: torch.Tensor) -> None:
        difference = float((OutputHead(self.model)(hidden) - own).abs().max() / own.abs().max())
        if not difference <= PROBE_TOLERANCE[self.dtype]:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} computes its logits in a way this engine does not follow "
                f"(relative difference {difference:.1e})"
            )


def _reserve(kv_bytes: int) -> SlotMemory:
    try:
        return SlotMemory(kv_bytes)
    except OSError as error:
        raise ParameterError(
            "kv_bytes", f"{kv_bytes} bytes cannot be had ({error}); ask for fewer"
        ) from error


def _choose_device(device: str) -> str:
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ParameterError("device", "cuda was asked for, but torch finds no GPU; use cpu or auto")
    return ("cuda" if has_gpu else "cpu") if device == "auto" else device


def _choose_dtype(dtype: str, device: str) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen
