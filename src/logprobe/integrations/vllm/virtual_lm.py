"""`AsyncVirtualLM`: next-token distributions from vLLM's engine, as genlm-backend's users ask for them.

`next_token` holds rows and asks; the engine on vLLM has the one scheduler.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from logprobe.config import EngineConfig
from logprobe.errors import MissingPackageError, UnknownParameterError, require
from logprobe.models.lora import stable_id
from logprobe.next_token.batcher import check_batching
from logprobe.next_token.lm import NextTokenLM
from logprobe.next_token.rows import RowCache
from logprobe.next_token.source import EngineRows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from logprobe.engine.backends.start import LoadedModel
    from logprobe.processors import GlobalLogprobsCapture

ENGINE_DEFAULTS = {
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "gpu_memory_utilization": 0.9,
}
CACHE_OPTIONS = ("move_to_cpu",)  # rows are there anyway
FLOAT_BYTES = ID_BYTES = 4


class AsyncVirtualLM(NextTokenLM[torch.Tensor]):
    """A model in vLLM asked for next-token distributions; see `NextTokenLM` for all that it answers.

    Rows are float32 tensors on the CPU, of the caller's own. vLLM schedules what is asked; whatever it runs
    together, each row is its prefix's own.

    Args:
        llm_engine: a `vllm.LLM` or `vllm.v1.engine.async_llm.AsyncLLM` that was made with `engine_options()`,
            or an open `logprobe.LLM`. It stays its owner's: `cleanup` leaves it running.
        logprobs_capture: shown the rows of each answer, where it is given.
        cache_size: most rows that are kept whole, least recently used out first; 0 keeps none.
        cache_opts: genlm-backend's `move_to_cpu`, which changes nothing here.
        batch_size: asks that start a step at once where the engine is idle.
        timeout: seconds after which the first of fewer asks starts a step; a busy engine takes asks at once.

    Raises:
        MissingPackageError: vLLM is not installed; an `ImportError`.
        ParameterError: a setting that cannot be used, or an engine that was made without what rows need.
    """

    default_params: ClassVar[dict[str, Any]] = {
        "max_tokens": 1,
        "n": 1,
        "detokenize": False,
        "stop": None,
        "ignore_eos": True,
    }
    """What an ask for a row is to vLLM, as genlm-backend says it; for reading alone."""

    def __init__(
        self,
        llm_engine: Any,
        logprobs_capture: GlobalLogprobsCapture | None = None,
        cache_size: int = 0,
        cache_opts: Mapping[str, Any] | None = None,
        batch_size: int = 20,
        timeout: float = 0.02,
        *,
        owns_engine: bool = False,
    ) -> None:
        _check_settings(cache_size, cache_opts, batch_size, timeout)
        loaded, is_made_here = _loaded(llm_engine)
        self.llm_engine = llm_engine
        self.logprobs_capture = logprobs_capture
        limits = loaded.engine.capabilities()
        most_bytes = FLOAT_BYTES * limits.vocab_size + ID_BYTES * limits.max_model_len
        super().__init__(
            EngineRows(loaded),
            loaded.text,
            as_caller=_as_tensor,
            on_rows=None if logprobs_capture is None else logprobs_capture.keep,
            cache=RowCache(cache_size * most_bytes, cache_size),
            batch_size=batch_size,
            timeout=timeout,
            owns_source=owns_engine or is_made_here,
        )

    @classmethod
    def from_name(
        cls, model_name: str | Path, engine_opts: Mapping[str, Any] | None = None, **settings: Any
    ) -> Self:
        """Load a model into vLLM.

        Args:
            model_name: a known name, a folder or a Hugging Face id.
            engine_opts: vLLM's own engine options by name, such as `tensor_parallel_size` or `enable_lora`;
                unless told, prefixes are cached, statistics are off and `gpu_memory_utilization` is 0.9.
            settings: `cache_size`, `cache_opts`, `batch_size` and `timeout`.

        Raises:
            MissingPackageError: vLLM is not installed; an `ImportError`.
            ModelError: the model cannot be had or used.
            ParameterError: a setting that cannot be used, or an option that vLLM refuses.
        """
        from logprobe.processors import GlobalLogprobsCapture

        _need_vllm()
        known = ("cache_opts", "cache_size", "batch_size", "timeout")
        for name in settings.keys() - set(known):
            raise UnknownParameterError(name, known, of="AsyncVirtualLM")
        _check_settings(**settings)
        from logprobe.integrations.vllm.start import start_vllm_engine

        loaded = start_vllm_engine(_config(model_name, engine_opts))
        try:
            return cls(loaded, GlobalLogprobsCapture(), **settings, owns_engine=True)
        except BaseException:
            loaded.engine.close()
            raise

    @staticmethod
    def engine_options(
        model_name: str | Path, engine_opts: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What an engine that is given here is made of: `vllm.LLM(**AsyncVirtualLM.engine_options(model))`.

        Raises:
            MissingPackageError: vLLM is not installed; an `ImportError`.
            ModelError: the model cannot be had.
            ParameterError: an option that does not exist, or cannot be set.
        """
        _need_vllm()
        from logprobe.integrations.vllm.existing import options_of

        return options_of(_config(model_name, engine_opts))

    @staticmethod
    def hash_to_int(value: str) -> int:
        """The number of LoRA weights of this name in vLLM: the same in every process, in [1, 2**31 - 1]."""
        return stable_id(value)

    def cleanup(self) -> None:
        """End what is in flight and let go of all; a second call does nothing, asking afterwards raises."""
        super().cleanup()
        if self.logprobs_capture is not None:
            self.logprobs_capture.clear()


def _as_tensor(rows: npt.NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(rows) if rows.flags.writeable else torch.tensor(rows)


def _check_settings(
    cache_size: int = 0,
    cache_opts: Mapping[str, Any] | None = None,
    batch_size: int = 20,
    timeout: float = 0.02,
) -> None:
    """Refuse what cannot be before a model is loaded."""
    check_batching(batch_size=batch_size, timeout=timeout)
    is_count = isinstance(cache_size, int) and not isinstance(cache_size, bool) and cache_size >= 0
    require(is_count, "cache_size", f"must be a number of rows (0 keeps none), got {cache_size!r}")
    for name in cache_opts or {}:
        if name not in CACHE_OPTIONS:
            raise UnknownParameterError(name, CACHE_OPTIONS, of="cache_opts")


def _need_vllm() -> None:
    if find_spec("vllm") is None:
        raise MissingPackageError("AsyncVirtualLM needs vLLM; pip install 'logprobe[vllm]'")


def _config(model_name: str | Path, engine_opts: Mapping[str, Any] | None) -> EngineConfig:
    options = ENGINE_DEFAULTS | dict(engine_opts or {})
    return EngineConfig(engine="vllm", model=os.fspath(model_name), engine_options=options)


def _loaded(llm_engine: Any) -> tuple[LoadedModel, bool]:
    """An engine that exists with its words, and whether what stands around it is made here."""
    loaded: Any = getattr(llm_engine, "loaded", llm_engine)
    if hasattr(loaded, "engine") and hasattr(loaded, "text"):
        return loaded, False
    _need_vllm()
    from logprobe.integrations.vllm.existing import existing_engine

    return existing_engine(llm_engine), True
