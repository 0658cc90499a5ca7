"""The native forward pass: one step's packed tokens through the model.

Before it: the scheduler's plan. After it: hidden rows in their slots, which the output head reads.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.engine.forward.kv_cache import KVPool
from logprobe.engine.forward.process_memory import PagedMemory, give_back_memory, return_freed
from logprobe.engine.forward.ready import make_ready
from logprobe.engine.forward.system_limits import default_kv_bytes
from logprobe.errors import EngineClosedError, ParameterError, require
from logprobe.models import load_config, load_model
from logprobe.models.given import is_copy
from logprobe.models.loading import load_state
from logprobe.models.lora import load_lora

if TYPE_CHECKING:
    from logprobe.config import EngineConfig
    from logprobe.engine.forward.ready import ReadyModel
    from logprobe.engine.protocol import StepBatch
    from logprobe.models import ModelFiles
    from logprobe.models.loading import State
    from logprobe.models.lora import LoraWeights
    from logprobe.records.values import IntArray

GPU_SHARE = 0.7  # of the GPU's memory that the weights leave, for keys, values and hidden states
LONG_CONTEXT = 2048  # tokens from which on a chunk's scratch, megabytes for each thousand, is returned


class NativeForward:
    """Owns the model, the key/value pool and the hidden rows, all by slot."""

    decoder: Any  # `Decoder`, `CudaDecoder` or `TransformersDecoder`; None once closed
    _memory: PagedMemory | None
    _own_module: Any = None

    def __init__(self, config: EngineConfig, files: ModelFiles, state: State | None = None) -> None:
        """Load the model of `files`, or that of another forward pass with other weights."""
        self.device = _choose_device(config.device)
        _check_arithmetic(config, self.device)
        self._files, self._is_replaced = files, state is not None
        ready = make_ready(
            files,
            dtype=None if config.dtype == "auto" else getattr(torch, config.dtype),
            device=self.device,
            weights=config.weights,
            state=state,
            arithmetic=config.arithmetic,
            kv_dtype=getattr(torch, config.kv_dtype),
        )
        self.decoder, self.layout, self.dtype = ready.decoder, ready.layout, ready.dtype
        if config.batch_invariant:
            self._check_invariant()
        self.is_recalled = ready.is_recalled
        self.vocab_size, self.context_len = ready.vocab_size, ready.context_len
        self.rope_boundary = ready.layout.rope_boundary
        self.eos_token_ids = ready.eos_token_ids
        self._had_loras = False  # some row of the last step ran under LoRA weights
        if not ready.is_recalled:
            gc.collect()  # transformers' module, where ours took its place
            return_freed()
        self.kv_bytes = config.kv_bytes or self._default_kv_bytes(config.data_parallel)
        self._reserve_slots(self.kv_bytes, ready)
        self.decoder.record_on(self.pool, min(self.num_slots, self.context_len))

    def _check_invariant(self) -> None:
        """Refuse a model whose rows are computed with what depends on the rows beside them."""
        is_native = self.layout.why_transformers is None
        what = f"the transformers decoder runs this model on {self.device}, and its bits depend on the batch"
        require(
            is_native, "batch_invariant", f"{what}; leave it out, or use a model that a native decoder runs"
        )

    @property
    def weights(self) -> str:
        """The form of the weights."""
        return self.layout.weights

    def transformers_model(self) -> Any:
        """The module of transformers with the weights that run: the one that runs, or one made when asked.

        Raises:
            EngineClosedError: this one was closed.
        """
        if self.decoder is None:
            raise EngineClosedError("the engine was closed, and its model with it")
        if self.layout.why_transformers is not None:
            return self.decoder.model
        if self._own_module is None:
            self._own_module = (
                load_state(self._files, self.decoder.state(), dtype=self.dtype)
                if self._is_replaced or is_copy(self._files.folder)  # whose weights are removed
                else load_model(self._files, dtype=self.dtype)
            )
        return self._own_module

    def close(self) -> None:
        """Let the weights and the pool go; nothing runs after it."""
        for name in ("decoder", "pool", "hidden", "_own_module"):
            setattr(self, name, None)
        if self._memory is not None:
            self._memory.release()
            self._memory = None
        give_back_memory()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _reserve_slots(self, kv_bytes: int, ready: ReadyModel) -> None:
        slot_numbers = sum(prod(shape) for shapes in ready.kv_shapes.values() for shape in shapes)
        slot_bytes = slot_numbers * ready.kv_dtype.itemsize + ready.hidden_size * self.dtype.itemsize
        self.num_slots = kv_bytes // slot_bytes
        if self.num_slots < 2:
            raise ParameterError(
                "kv_bytes", f"one token takes {slot_bytes} bytes; give room for more of them"
            )
        self._memory = _reserve(kv_bytes) if self.device == "cpu" else None
        if self.device == "cuda":
            torch.cuda.empty_cache()
            free_bytes, _ = torch.cuda.mem_get_info()
            what = f"{kv_bytes} bytes are more than the {free_bytes} that are free on the GPU"
            remedy = "ask for fewer (replacing weights holds two caches for a moment)"
            require(kv_bytes <= free_bytes, "kv_bytes", f"{what}; {remedy}")
        self.pool = KVPool(self.num_slots)
        self.pool.lay_out(ready.kv_shapes, partial(self._new_zeros, dtype=ready.kv_dtype))
        self.hidden = self._new_zeros((self.num_slots, ready.hidden_size), dtype=self.dtype)

    def load_lora(self, name: str, path: str, number: int) -> LoraWeights:
        """LoRA weights of a folder, for this model or one of its shape.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
            EngineClosedError: this one was closed.
        """
        if self.decoder is None:
            raise EngineClosedError("the engine was closed before the LoRA weights were loaded")
        config = load_config(self._files)
        lora = load_lora(name, path, config, number, dtype=self.dtype, device=self.device)
        self.decoder.check_lora(lora)
        return lora

    def make_room(self, lora: LoraWeights) -> None:
        """Let steps name such weights.

        Raises:
            EngineClosedError: this one was closed.
        """
        if self.decoder is None:
            raise EngineClosedError("the engine was closed before the LoRA weights had room")
        self.decoder.make_room(lora)

    def with_weights(self, config: EngineConfig, state: State) -> NativeForward:
        """The same with other weights.

        Raises:
            ModelError: they do not fit the model.
            EngineClosedError: this one was closed.
        """
        if self.decoder is None:
            raise EngineClosedError("the engine was closed before the new weights answered")
        # As many slots: what was admitted counts on them, and less is free while both are here.
        return NativeForward(replace(config, kv_bytes=self.kv_bytes), self._files, state)

    def _default_kv_bytes(self, num_pools: int) -> int:
        if self.device == "cpu":
            return default_kv_bytes(num_pools)
        torch.cuda.empty_cache()  # what the comparison at load took
        free_bytes, _ = torch.cuda.mem_get_info()
        return int(free_bytes * GPU_SHARE / num_pools)

    def _new_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._memory is not None:
            return self._memory.take(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> None:
        """Run a step's tokens; their keys, values and last hidden states land in their slots."""
        if not len(batch.token_ids):
            return
        if self.rope_boundary is None:
            self._run_together(batch, is_long=False)
            return
        for is_long in (False, True):
            spans = batch.only(is_long=is_long)
            if len(spans.token_ids):
                self._run_together(spans, is_long=is_long)

    def _run_together(self, batch: StepBatch, *, is_long: bool) -> None:
        """Run tokens of one kind of rotary frequencies."""
        attention = self.decoder.plan(self.pool, batch)
        leaves_scratch = self.device == "cpu" and attention.longest_chunk >= LONG_CONTEXT
        if leaves_scratch:
            return_freed()  # the logits of the last chunk, where it was scored
        has_loras = any(lora is not None for lora in batch.loras)
        if has_loras or self._had_loras:  # those of the last step would run on
            self.decoder.loras.select(batch, self.device)
            self._had_loras = has_loras
        hidden = self.decoder(batch.token_ids, batch.positions, attention, is_long=is_long)
        if leaves_scratch:
            return_freed()  # the next chunk's scratch is larger, and would not fit where this one's was
        self.hidden.index_copy_(0, attention.slots, hidden)

    @torch.inference_mode()
    def hidden_rows(self, slots: IntArray) -> torch.Tensor:
        """The last hidden states of the tokens in `slots`, (len(slots), hidden size)."""
        return self.hidden.index_select(0, torch.from_numpy(slots.astype(np.int64)).to(self.device))

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor, lora: LoraWeights | None = None) -> torch.Tensor:
        """(rows, hidden size) → (rows, vocabulary) float32 logits, all under the same LoRA weights."""
        logits: torch.Tensor = self.decoder.head(hidden, lora)
        return logits


def _reserve(kv_bytes: int) -> PagedMemory:
    try:
        return PagedMemory(kv_bytes)  # not huge: one slot lies in many places, and would take a page in each
    except OSError as error:
        raise ParameterError(
            "kv_bytes", f"{kv_bytes} bytes cannot be had ({error}); ask for fewer"
        ) from error


def _choose_device(device: str) -> str:
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ParameterError("device", "cuda was asked for, but torch finds no GPU; use cpu or auto")
    return ("cuda" if has_gpu else "cpu") if device == "auto" else device


def _check_arithmetic(config: EngineConfig, device: str) -> None:
    """Refuse an arithmetic that the device does not have."""
    known = ("auto", "fma") if device == "cpu" else ("auto", "bf16x3", "bf16")
    what = f"{config.arithmetic} is not for device {device}; use one of {', '.join(known)}"
    require(config.arithmetic in known, "arithmetic", what)
    has_dtype = device != "cpu" or config.kv_dtype == "float32"
    require(has_dtype, "kv_dtype", f"{config.kv_dtype} is for a GPU; on a CPU it is float32")
