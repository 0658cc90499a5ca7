"""Subclasses of genlm-backend's `AsyncLM` that run this library, for genlm-control and similar packages.

Use `PromptedLLM(LogprobeLM.from_name("smollm2"))`, or `LogprobeVirtualLM` for a model that runs in vLLM.
Within `serve_by_name()`, `PromptedLLM.from_name(name, backend="hf")` loads a model with this library, and
`backend="vllm"` loads a model with this library in vLLM.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self, final

import genlm.backend.llm as genlm_llm
import torch
from genlm.backend.llm.base import AsyncLM as GenlmAsyncLM
from genlm.backend.tokenization import Token as GenlmToken

from logprobe.errors import UnknownParameterError, require
from logprobe.integrations.vllm.virtual_lm import AsyncVirtualLM
from logprobe.next_token.async_lm import AsyncLM

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

# Options of transformers that are supported: name → field of `EngineConfig`.
HF_OPTIONS = {"torch_dtype": "dtype", "dtype": "dtype", "device_map": "device"}
# Variables that genlm-backend sets at import for its own class: one process, and a runner that CPUs cannot
# use.
GENLMS_VLLM: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1"}


class GenlmLM(GenlmAsyncLM):  # type: ignore[misc]  # genlm-backend has no types
    """A language model of this library as genlm-backend's `AsyncLM`; rows are torch tensors.

    Callers may modify the rows that they get. `lora_name` selects a LoRA adapter per call, as in
    genlm-backend since 0.3.
    """

    def __init__(self, lm: AsyncLM | AsyncVirtualLM) -> None:
        # Does not call the base's `__init__`, which derives a less exact vocabulary from the tokenizer.
        self.lm = lm
        self.tokenizer = lm.tokenizer
        num_tokens = max(token.token_id for token in lm.byte_vocab if token) + 1
        # Ids at the end that the tokenizer lacks have no bytes; genlm-control would sample them endlessly.
        tokens = lm.byte_vocab[:num_tokens]
        self.byte_vocab = [GenlmToken(token.token_id, token.byte_string) for token in tokens]
        self.str_vocab = lm.str_vocab[:num_tokens]

    @property
    def batch_size(self) -> int:
        """Number of pending requests at which an idle engine starts a step immediately; may be set."""
        return self.lm.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        self.lm.batch_size = batch_size

    @property
    def timeout(self) -> float:
        """Seconds after which an idle engine starts a step even for fewer requests; may be set."""
        return self.lm.timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        self.lm.timeout = timeout

    async def next_token_logprobs(self, token_ids: Sequence[int], lora_name: str | None = None) -> Any:
        """Return the log-probabilities of the next token, a (V,) float32 tensor in nats.

        Raises:
            ParameterError: `token_ids` is empty, which genlm-backend always rejects, or for the reasons given
                in `AsyncLM.next_token_logprobs`.
        """
        _check_given(token_ids)
        return _tensor(await self.lm.next_token_logprobs(token_ids, lora=lora_name))

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[Sequence[int]], lora_name: str | None = None
    ) -> Any:
        """Return the log-probabilities of the token after each prefix, an (n, V) float32 tensor in nats."""
        for token_ids in token_ids_list:
            _check_given(token_ids)
        return _tensor(await self.lm.batch_next_token_logprobs(token_ids_list, lora=lora_name))

    def next_token_logprobs_sync(self, token_ids: Sequence[int], lora_name: str | None = None) -> Any:
        """Blocking version of `next_token_logprobs`."""
        _check_given(token_ids)
        return _tensor(self.lm.next_token_logprobs_sync(token_ids, lora=lora_name))

    def next_token_logprobs_uncached(self, token_ids: Sequence[int], lora_name: str | None = None) -> Any:
        """Blocking version of `next_token_logprobs` that bypasses the row cache."""
        _check_given(token_ids)
        return _tensor(self.lm.next_token_logprobs_sync(token_ids, lora=lora_name, use_cache=False))

    def cache_kv(self, prompt_tokens: Sequence[int], lora_name: str | None = None) -> None:
        """Run a prompt now, so that later prompts that begin with it reuse its KV cache."""
        self.next_token_logprobs_uncached(prompt_tokens, lora_name)

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[Sequence[int]], lora_name: str | None = None
    ) -> Any:
        """Blocking version of `batch_next_token_logprobs`."""
        for token_ids in token_ids_list:
            _check_given(token_ids)
        return _tensor(self.lm.batch_next_token_logprobs_sync(token_ids_list, lora=lora_name))

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Sample until any of `eos_token_ids`, which is not returned; no other token ends the sample."""
        return await self.lm.sample(
            prompt_token_ids, max_tokens, eos_token_ids, temperature, seed, lora=lora_name, ignore_eos=True
        )

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[Sequence[int]],
        max_tokens: int,
        eos_token_ids: Sequence[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[list[int]]:
        """Sample from all prompts concurrently; with a seed, equal prompts still get different samples."""
        samples = await self.lm.batch_sample(
            prompt_token_ids_list,
            max_tokens,
            eos_token_ids,
            temperature,
            seed,
            lora=lora_name,
            ignore_eos=True,
        )
        return [*samples]

    def add_new_lora(self, lora_path: str | Path, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter from a folder."""
        self.lm.add_lora(lora_name, lora_path)

    def remove_lora(self, lora_name: str) -> None:
        """Unload a LoRA adapter; new requests for it fail."""
        self.lm.remove_lora(lora_name)

    def clear_cache(self) -> None:
        """Clear the row cache."""
        self.lm.clear_cache()

    def clear_kv_cache(self) -> None:
        """Clear the engine's prefix cache, except for prefixes in use."""
        self.lm.clear_kv_cache()

    def reset_async_queries(self) -> None:
        """Fail every request in flight with an error."""
        self.lm.reset_async_queries()

    def cleanup(self) -> None:
        """Release the model."""
        self.lm.close()


@final
class LogprobeLM(GenlmLM):
    """This library's `AsyncLM` as a subclass of genlm-backend's `AsyncLM`."""

    @classmethod
    def from_name(cls, name: str, *, hf_opts: dict[str, Any] | None = None, **settings: Any) -> Self:
        """Load a model; `settings` are those of `AsyncLM.from_name`.

        Raises:
            ModelError: the model cannot be loaded.
            ParameterError: a setting is invalid, or `hf_opts` has options other than dtype and device.
        """
        for option, value in (hf_opts or {}).items():
            if option not in HF_OPTIONS:
                raise UnknownParameterError(option, HF_OPTIONS, of="hf_opts")
            settings[HF_OPTIONS[option]] = _word_of(value)
        return cls(AsyncLM.from_name(name, **settings))


@final
class LogprobeVirtualLM(GenlmLM):
    """This library's `AsyncVirtualLM` as a subclass of genlm-backend's `AsyncLM`; the model runs in vLLM."""

    @classmethod
    def from_name(cls, name: str, engine_opts: Mapping[str, Any] | None = None, **settings: Any) -> Self:
        """Load a model into vLLM; `settings` are those of `AsyncVirtualLM.from_name`.

        Raises:
            MissingPackageError: vLLM is not installed (a subclass of `ImportError`).
            ModelError: the model cannot be loaded.
            ParameterError: a setting is invalid, or vLLM rejects an option.
        """
        with _vllm_as_it_comes():
            return cls(AsyncVirtualLM.from_name(name, engine_opts, **settings))


def _tensor(rows: Any) -> torch.Tensor:
    """Convert rows to a tensor that the caller may modify; read-only rows, from the cache, are copied."""
    if isinstance(rows, torch.Tensor):
        return rows
    return torch.from_numpy(rows) if rows.flags.writeable else torch.tensor(rows)


@contextmanager
def _vllm_as_it_comes() -> Iterator[None]:
    """Within the block, unset the environment variables for vLLM that genlm-backend sets when imported."""
    set_by_genlm = {name: value for name, value in GENLMS_VLLM.items() if os.environ.get(name) == value}
    for name in set_by_genlm:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(set_by_genlm)


def _word_of(value: Any) -> str:
    """Convert a dtype or device, given as a torch object or a name, to its name in `EngineConfig`."""
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    return str(dtype if isinstance(dtype, torch.dtype) else value).removeprefix("torch.")


def _check_given(token_ids: Sequence[int]) -> None:
    require(len(token_ids), "token_ids", "must not be empty; give at least one token, such as the BOS")


@contextmanager
def serve_by_name() -> Iterator[None]:
    """Within the block, genlm-backend's backends "hf" and "vllm" load models with this library."""
    own = genlm_llm.AsyncTransformer, genlm_llm.AsyncVirtualLM
    genlm_llm.AsyncTransformer, genlm_llm.AsyncVirtualLM = LogprobeLM, LogprobeVirtualLM
    try:
        yield
    finally:
        genlm_llm.AsyncTransformer, genlm_llm.AsyncVirtualLM = own
