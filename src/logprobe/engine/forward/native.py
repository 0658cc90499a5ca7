"""The forward pass of the native engine: runs a scheduled step and stores its final hidden states by slot."""

from __future__ import annotations

import gc
import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final

from logprobe.engine.forward.cpu.decoder import Decoder
from logprobe.engine.forward.device import choose_device, on_device
from logprobe.engine.forward.kv_cache import KVPool
from logprobe.engine.forward.load import make_ready
from logprobe.engine.forward.process_memory import (
    PagedMemory,
    give_back_memory,
    put_back_into_collections,
    return_freed,
)
from logprobe.engine.forward.system_limits import default_kv_bytes
from logprobe.engine.protocol import ModelShape
from logprobe.errors import EngineClosedError, ParameterError, require
from logprobe.kernels.arrays import as_array
from logprobe.kernels.info import cpu_arithmetics
from logprobe.kernels.native import library
from logprobe.models import load_config, load_model
from logprobe.models.given import is_copy
from logprobe.models.loading import check_transformers, load_state
from logprobe.models.quiet import quiet_transformers

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from logprobe.config import EngineConfig
    from logprobe.engine.forward.ready import ReadyModel
    from logprobe.engine.protocol import StepBatch
    from logprobe.kernels.arrays import Array
    from logprobe.models import ModelFiles
    from logprobe.models.loading import State
    from logprobe.models.lora import LoraWeights, ModelModules
    from logprobe.records.values import IntArray

logger = logging.getLogger("logprobe")

GPU_SHARE = 0.7  # keys, values and hidden states get this share of the GPU memory left after loading
ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
LONG_CONTEXT = 2048  # from this many context tokens, a chunk's scratch memory is returned to the system


class NativeForward:
    """Owns the model, the KV cache and the final hidden states; the last two are indexed by slot."""

    decoder: Any  # `Decoder`, `CudaDecoder` or `TransformersDecoder`; None once closed
    _memory: PagedMemory | None
    _own_module: Any = None

    def __init__(self, config: EngineConfig, files: ModelFiles, state: State | None = None) -> None:
        """Load the model in `files`, with the weights in `state` if given (name → tensor)."""
        self.device = choose_device(config.device)
        _check_arithmetic(config, self.device)
        self._files, self._is_replaced = files, state is not None
        with on_device(self.device):
            self._load(config, state)

    def _load(self, config: EngineConfig, state: State | None) -> None:
        ready = make_ready(
            self._files,
            dtype=None if config.dtype == "auto" else config.dtype,
            device=self.device,
            weights=config.load_config.weights,
            state=state,
            arithmetic=config.load_config.arithmetic,
            kv_dtype=config.cache_config.kv_cache_dtype,
        )
        self.decoder, self.layout, self.dtype = ready.decoder, ready.layout, ready.dtype
        if self.device == "cpu" and config.load_config.arithmetic == "bf16x3":
            self._warn_of_bf16x3()
        # The native decoder computes with arrays, and other decoders with tensors.
        self._is_native = isinstance(self.decoder, Decoder)
        if config.batch_invariant:
            self._check_invariant()
        self.is_recalled = ready.is_recalled
        self.vocab_size, self.context_len = ready.vocab_size, ready.context_len
        self.rope_boundary = ready.layout.rope_boundary
        self.shape = _shape_of(ready)
        self.eos_token_ids = ready.eos_token_ids
        self._had_loras = False  # True if a row of the last step used LoRA weights
        if not ready.is_recalled:
            gc.collect()  # frees transformers' module if the native decoder runs
            return_freed()
        num_pools = config.parallel_config.data_parallel_size
        self.kv_bytes = config.cache_config.kv_cache_memory_bytes or self._default_kv_bytes(num_pools)
        self._reserve_slots(self.kv_bytes, ready)
        self.decoder.record_on(self.pool, min(self.num_slots, self.context_len))

    def _warn_of_bf16x3(self) -> None:
        if self.layout.arithmetic != "bf16x3":
            logger.warning("%s: no matrix is in a format for bf16x3; using fma", self._files.name)
        elif not library().has_tiles:
            remedy = "products are emulated, with the same bits but slower than with fma"
            logger.warning("bf16x3: AMX is not available to this process, so %s", remedy)

    def _check_invariant(self) -> None:
        """Raise `ParameterError` if the bits of a row's results may depend on the batch."""
        is_native = self.layout.why_transformers is None
        what = f"is not supported: results of the transformers decoder on {self.device} depend on the batch"
        require(
            is_native, "batch_invariant", f"{what}; leave it out, or use a model that a native decoder runs"
        )

    @property
    def weights(self) -> str:
        """Weight format in use, `checkpoint` or `plain`."""
        return self.layout.weights

    def transformers_model(self) -> Any:
        """Return a transformers model with the current weights.

        This is the running model if the transformers decoder is used. Otherwise it is loaded at the first
        call.

        Raises:
            EngineClosedError: `close` was called.
            MissingPackageError: torch or transformers is not installed.
        """
        if self.decoder is None:
            raise EngineClosedError("the engine was closed, which released its model")
        if self.layout.why_transformers is not None:
            return self.decoder.model
        if self._own_module is None:
            check_transformers(f"{self._files.name}: the transformers model")
            import torch

            dtype: torch.dtype = getattr(torch, self.dtype)
            self._own_module = (
                load_state(self._files, self.decoder.state(), dtype=dtype)
                if self._is_replaced or is_copy(self._files.folder)  # a copy's weight files are deleted
                else load_model(self._files, dtype=dtype)
            )
        return self._own_module

    def close(self) -> None:
        """Free the weights and the KV cache; no step can run afterwards."""
        for name in ("decoder", "pool", "hidden", "_own_module"):
            setattr(self, name, None)
        if self._memory is not None:
            self._memory.release()
            self._memory = None
        if self._is_native:  # counting references has freed its arrays
            put_back_into_collections()
            return_freed()
        else:
            give_back_memory()
        if self.device != "cpu":
            import torch

            torch.cuda.empty_cache()

    def _reserve_slots(self, kv_bytes: int, ready: ReadyModel) -> None:
        slot_numbers = sum(prod(shape) for shapes in ready.kv_shapes.values() for shape in shapes)
        slot_bytes = slot_numbers * ITEM_BYTES[ready.kv_dtype] + ready.hidden_size * ITEM_BYTES[self.dtype]
        self.num_slots = kv_bytes // slot_bytes
        if self.num_slots < 2:
            raise ParameterError(
                "kv_cache_memory_bytes",
                f"is too small: one token takes {slot_bytes} bytes, and at least two must fit; raise it",
            )
        self._memory = _reserve(kv_bytes) if self.device == "cpu" else None
        if self.device != "cpu":
            import torch

            torch.cuda.empty_cache()
            free_bytes, _ = torch.cuda.mem_get_info()
            what = f"{kv_bytes} bytes exceed the {free_bytes} bytes that are free on the GPU"
            remedy = "lower it (replacing weights briefly needs two caches)"
            require(kv_bytes <= free_bytes, "kv_cache_memory_bytes", f"{what}; {remedy}")
        self.pool = KVPool(self.num_slots)
        self.pool.lay_out(ready.kv_shapes, partial(self._new_zeros, dtype=ready.kv_dtype))
        self.hidden: Any = self._new_zeros((self.num_slots, ready.hidden_size), dtype=self.dtype)

    def load_lora(self, name: str, path: str, number: int) -> LoraWeights:
        """Load LoRA weights from a folder; they stay valid when the model's weights are replaced.

        Raises:
            ModelError: the folder cannot be read, or the LoRA weights do not fit the model.
            EngineClosedError: `close` was called.
        """
        if self.decoder is None:
            raise EngineClosedError("the engine was closed before the LoRA weights were loaded")
        from logprobe.models.lora import load_lora

        lora = load_lora(name, path, self._lora_modules(), number)
        self.decoder.check_lora(lora)
        return lora

    def _lora_modules(self) -> ModelModules:
        """Return the modules that LoRA weights may change."""
        if isinstance(self.decoder, Decoder):
            return self.decoder.modules()
        with quiet_transformers():
            from logprobe.models.lazy import modules_of

            return modules_of(load_config(self._files))

    def make_room(self, lora: LoraWeights) -> None:
        """Prepare `lora` for steps with this model's weights.

        Raises:
            EngineClosedError: `close` was called.
        """
        if self.decoder is None:
            raise EngineClosedError("the engine was closed before the LoRA weights were prepared")
        self.decoder.make_room(lora)

    def with_weights(self, config: EngineConfig, state: State) -> NativeForward:
        """Return a new forward pass of this model with the weights in `state` (parameter name → tensor).

        Raises:
            ModelError: the weights do not fit the model.
            EngineClosedError: `close` was called.
        """
        if self.decoder is None:
            raise EngineClosedError("the engine was closed before the new weights were loaded")
        # Keep the cache size: admitted requests rely on it, and less memory is free while both exist.
        cache = replace(config.cache_config, kv_cache_memory_bytes=self.kv_bytes)
        return NativeForward(replace(config, cache_config=cache), self._files, state)

    def _default_kv_bytes(self, num_pools: int) -> int:
        if self.device == "cpu":
            return default_kv_bytes(num_pools)
        import torch

        torch.cuda.empty_cache()  # scratch of the verification at load
        free_bytes, _ = torch.cuda.mem_get_info()
        return int(free_bytes * GPU_SHARE / num_pools)

    def _new_zeros(self, shape: tuple[int, ...], dtype: str) -> Array | torch.Tensor:
        if self._is_native:
            assert self._memory is not None
            return self._memory.take(shape, dtype)
        from logprobe.engine.forward.torch.tensors import new_zeros

        return new_zeros(shape, dtype, self.device, self._memory)

    def run(self, batch: StepBatch) -> None:
        """Run a step's tokens, and store their keys, values and final hidden states in their slots."""
        if not len(batch.token_ids):
            return
        with self._running():
            self._run(batch)

    def _running(self) -> AbstractContextManager[Any]:
        if self._is_native:
            return nullcontext()
        import torch

        return torch.inference_mode()

    def _run(self, batch: StepBatch) -> None:
        if self.rope_boundary is None:
            self._run_together(batch, is_long=False)
            return
        for is_long in (False, True):
            spans = batch.only(is_long=is_long)
            if len(spans.token_ids):
                self._run_together(spans, is_long=is_long)

    def _run_together(self, batch: StepBatch, *, is_long: bool) -> None:
        """Run tokens that all use the short rotary frequencies, or all the long ones (`is_long`)."""
        attention = self.decoder.plan(self.pool, batch)
        leaves_scratch = self.device == "cpu" and attention.longest_chunk >= LONG_CONTEXT
        if leaves_scratch:
            return_freed()  # logits of the last chunk, if it was scored
        has_loras = any(lora is not None for lora in batch.loras)
        if has_loras or self._had_loras:  # also clears the rows of the last step
            self.decoder.loras.select(batch)
            self._had_loras = has_loras
        if batch.capture is None:
            hidden = self.decoder(batch.token_ids, batch.positions, attention, is_long=is_long)
        else:
            hidden = self.decoder(
                batch.token_ids, batch.positions, attention, is_long=is_long, capture=batch.capture
            )
        if leaves_scratch:
            return_freed()  # the next chunk's scratch is larger and would not fit into the freed blocks
        self.hidden[attention.slots] = hidden

    def hidden_rows(self, slots: IntArray) -> Any:
        """Return the final hidden states stored in `slots`, with shape (len(slots), hidden size).

        The states are an array on a CPU, and a tensor on a GPU.
        """
        if self._is_native:
            return self.hidden[slots]
        from logprobe.engine.forward.torch.tensors import rows_of

        return rows_of(self.hidden, slots)

    def head(self, hidden: Any, lora: LoraWeights | None = None) -> Any:
        """Return float32 logits (rows, vocabulary) of states (rows, hidden size); all rows use `lora`.

        The logits are an array on a CPU, and a tensor on a GPU.
        """
        if self._is_native:
            return self.decoder.head(as_array(hidden), lora)
        from logprobe.engine.forward.torch.tensors import logits_of

        return logits_of(self.decoder, hidden, lora)

    def normed(self, hidden: Array) -> Any:
        """Apply the model's final norm to an inner layer's float32 hidden states (rows, hidden size).

        Raises:
            UnsupportedModelError: the model's final norm is unknown.
        """
        with self._running():
            return self.decoder.normed(hidden)


def _shape_of(ready: ReadyModel) -> ModelShape:
    """Return the sizes of a model, and what its decoder reports about its layers."""
    sizes: dict[str, Any] = {
        "hidden_size": ready.hidden_size,
        "num_layers": ready.layout.num_layers,
        "weight_bytes": ready.decoder.weight_bytes if isinstance(ready.decoder, Decoder) else 0,
    }
    if ready.layout.why_transformers is not None:
        why = f"transformers' modules run this model ({ready.layout.why_transformers})"
        return ModelShape(**sizes, why_no_routes=why)
    decoder: Any = ready.decoder  # a native decoder, of a CPU or a GPU
    experts = [layer.experts for layer in decoder.layers if layer.experts is not None]
    if not experts:
        return ModelShape(**sizes)
    return ModelShape(
        **sizes,
        num_expert_layers=len(experts),
        num_experts=len(experts[0].inner),
        experts_per_token=decoder.spec.experts_per_token,
        why_no_routes=None,
    )


def _reserve(kv_bytes: int) -> PagedMemory:
    try:
        return PagedMemory(kv_bytes)  # no huge pages: a slot has parts in each layer, each would map one
    except OSError as error:
        raise ParameterError(
            "kv_cache_memory_bytes", f"cannot allocate {kv_bytes} bytes ({error}); lower it"
        ) from error


def _check_arithmetic(config: EngineConfig, device: str) -> None:
    """Check that the device supports the requested arithmetic and KV dtype."""
    known = ("auto", *cpu_arithmetics()) if device == "cpu" else ("auto", "bf16x3", "bf16")
    arithmetic, kv_dtype = config.load_config.arithmetic, config.cache_config.kv_cache_dtype
    what = f"{arithmetic} is not supported on {device}; use one of {', '.join(known)}"
    require(arithmetic in known, "arithmetic", what)
    has_dtype = device != "cpu" or kv_dtype == "float32"
    require(has_dtype, "kv_cache_dtype", f"{kv_dtype} is only supported on a GPU; use float32")
