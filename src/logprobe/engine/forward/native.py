"""The native forward pass: one step's packed tokens through the transformers model.

Before it: the scheduler's plan. After it: hidden rows in their slots, which the output head reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.engine.forward.attention import (
    AttentionPlan,
    Chunk,
    CurrentStep,
    every_way,
    plan_attention,
)
from logprobe.engine.forward.decoder import OutputHead
from logprobe.engine.forward.layout import layout_of
from logprobe.engine.forward.lora import Loras
from logprobe.engine.forward.pool import KVPool, SlotMemory
from logprobe.engine.forward.proof import NUM_TOKENS, Proof, refusing
from logprobe.engine.layers.fused import fuse_
from logprobe.engine.layers.int8 import CALIBRATION_TEXT, check_int8, quantise_
from logprobe.engine.layers.packed import choose_layout, pack_
from logprobe.engine.layers.published import publish_
from logprobe.engine.layers.recorded import RecordedSteps, record_steps
from logprobe.errors import ParameterError, UnsupportedModelError
from logprobe.models import load_model, load_panels, load_tokenizer

if TYPE_CHECKING:
    from logprobe.config import EngineConfig
    from logprobe.engine.protocol import StepBatch
    from logprobe.models import ModelFiles
    from logprobe.records.values import IntArray

DEFAULT_KV_BYTES = 1 << 30
MOST_INT8_LOSS = 0.1  # nats; what was measured on real models lies far below (docs/models.md)
RECORDED_TOLERANCE = 1e-5  # of the largest number; the integers are the same


class NativeForward:
    """Owns the model, the key/value pool and the hidden rows, all by slot."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self.device = _choose_device(config.device)
        dtype = _choose_dtype(config.dtype, self.device)
        self.model = load_model(files, dtype=dtype, device=self.device)
        self.vocab_size: int = _text_config(self.model).vocab_size
        self.context_len = refusing(self.model, lambda: _context_len(self.model))
        self.dtype: torch.dtype = self.model.dtype
        self.weights = choose_layout(self.model, config.weights)
        self._files = files
        probe = refusing(self.model, self._prove)
        self.rope_boundary: int | None = self.proof.rope_boundary
        int8_kl = self._quantise(files) if self.weights == "int8" else None
        self.head = OutputHead(self.model, self.proof.place)
        self.layout = layout_of(self.decoder.module, self.weights, self.proof, int8_kl=int8_kl)
        self.loras = Loras(self.model)
        hidden_size = self.proof.hidden_size
        slot_bytes = probe.bytes_per_slot + hidden_size * self.dtype.itemsize
        kv_bytes = config.kv_bytes or DEFAULT_KV_BYTES
        self.num_slots = kv_bytes // slot_bytes
        if self.num_slots < 2:
            raise ParameterError(
                "kv_bytes", f"one token takes {slot_bytes} bytes; give room for more of them"
            )
        self._memory = _reserve(kv_bytes) if self.device == "cpu" else None
        self.pool = KVPool(self.num_slots)
        self.pool.make_like(probe, self._new_zeros)
        self.hidden = self._new_zeros((self.num_slots, hidden_size))
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
        for is_long in (False, True):
            spans = batch.only(is_long=is_long)
            if len(spans.token_ids):
                self._run_together(spans, is_long=is_long)

    def _run_together(self, batch: StepBatch, *, is_long: bool) -> None:
        """Run tokens of one kind of rotary frequencies."""
        attention = plan_attention(self.pool, batch, self.device)
        self.loras.select(batch)
        recorded = None if self.loras.are_running else self.recorded
        if recorded is not None and recorded.can_run(attention):
            self.step.is_long = is_long
            hidden = recorded.run(batch.token_ids, batch.positions, attention)
        else:
            hidden = self.decoder(batch.token_ids, batch.positions, attention, is_long=is_long)
        self.hidden.index_copy_(0, attention.slots, hidden)

    @torch.inference_mode()
    def hidden_rows(self, slots: IntArray) -> torch.Tensor:
        """The last hidden states of the tokens in `slots`, (len(slots), hidden size)."""
        return self.hidden.index_select(0, torch.from_numpy(slots.astype(np.int64)).to(self.device))

    @torch.inference_mode()
    def _record(self) -> RecordedSteps | None:
        """Steps of few rows as one launch, where that gives the numbers of the layers one by one."""
        recorded = record_steps(self.decoder.module, self.pool, min(self.num_slots, self.context_len))
        if recorded is None:
            return None
        token_ids = positions = np.arange(min(NUM_TOKENS, self.num_slots))
        for [start], plan in every_way(self.pool, [torch.from_numpy(positions)]):
            own = self.decoder(token_ids[start:], positions[start:], plan)
            if recorded.can_run(plan):
                hidden = recorded.run(token_ids[start:], positions[start:], plan)
                if not torch.allclose(hidden, own, rtol=0, atol=RECORDED_TOLERANCE * float(own.abs().max())):
                    return None
        return recorded

    @torch.inference_mode()
    def _quantise(self, files: ModelFiles) -> float:
        """Turn the weights to 8 bits, calibrated by the plain forward pass on a short text.

        Returns:
            What the text's distributions lose by it: KL from the plain ones, mean over tokens, nats.

        Raises:
            ParameterError: 8 bits are not proven for this model, or lose too much.
        """
        check_int8(self.decoder.module)
        token_ids = np.array(load_tokenizer(files).encode(CALIBRATION_TEXT)[: self.context_len])
        slots = torch.arange(len(token_ids))

        def logprobs() -> torch.Tensor:
            plan = AttentionPlan(KVPool(len(slots)), slots, [Chunk(0, len(slots), slots)], None)
            hidden = self.decoder(token_ids, np.arange(len(token_ids)), plan)
            return OutputHead(self.model, self.proof.place)(hidden).double().log_softmax(-1)

        plain = logprobs()
        quantise_(self.decoder.module, logprobs)
        pack_(self.model)
        lost = float((plain.exp() * (plain - logprobs())).nansum(-1).mean())
        if not lost <= MOST_INT8_LOSS:
            raise ParameterError(
                "weights", f"int8 moves this model's distributions by {lost:.2g} nats; use packed or plain"
            )
        return lost

    @torch.inference_mode()
    def _prove(self) -> KVPool:
        """Follow the model, put faster modules in the places of its own, and prove the numbers.

        Returns:
            The pool of the proof: what every layer stores for a token.

        Raises:
            UnsupportedModelError: the model cannot be followed, or the numbers differ.
        """
        self.step = CurrentStep()
        self.proof = Proof(self.model, self.step, context_len=self.context_len)
        self.decoder = self.proof.observe()
        pool = self.proof.prove(self.decoder)
        if self.weights == "plain":
            return pool
        fuse_(self.model, self.step, self.proof.references)
        if self.weights == "packed":
            pack_(self.model)
        elif self.weights == "published":
            publish_(self.model, load_panels(self._files))
        return self.proof.prove(self.decoder)


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _context_len(model: Any) -> int:
    length = getattr(_text_config(model), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise UnsupportedModelError(
            "its positions have no end (it keeps a state of its own, or biases scores by distance)"
        )
    return length


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
