"""`AsyncVirtualLM`: next-token distributions from vLLM, with genlm-backend's interface.

`NextTokenLM` batches requests and caches rows; vLLM schedules them.
"""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, final

import numpy as np

from logprobe.config import EngineConfig
from logprobe.errors import MissingPackageError, UnknownParameterError, require
from logprobe.models.lora import stable_id
from logprobe.next_token.async_lm import AsyncLM
from logprobe.next_token.batcher import check_batching
from logprobe.next_token.engine_lm import EngineLM
from logprobe.next_token.rows import Prefix, RowCache

MISSING = "AsyncVirtualLM needs vLLM; pip install 'logprobe[vllm]'"

try:
    import torch
except ImportError as missing:
    raise MissingPackageError(MISSING) from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from logprobe.engine.backends.start import LoadedModel
    from logprobe.next_token.base import TokenIds
    from logprobe.next_token.rows import Row

ENGINE_DEFAULTS = {
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "gpu_memory_utilization": 0.9,
}
CACHE_OPTIONS = ("move_to_cpu",)  # has no effect, since rows are always on the CPU
FLOAT_BYTES = ID_BYTES = 4


class Capture(Protocol):
    """A logits processor that stores the rows that it gets, such as `GlobalLogprobsCapture`."""

    def apply(self, logits: torch.Tensor, /) -> torch.Tensor:
        """Store the log-softmax of (n, V) logits, and return the logits unchanged."""

    def clear(self) -> None:
        """Delete the stored rows."""


@final
class KeptRows:
    """Row cache of an `AsyncVirtualLM` as a map from token ids to rows, for the current LoRA adapter."""

    def __init__(self, rows: RowCache, prefix_of: Callable[[TokenIds], Prefix], maxsize: int) -> None:
        self._rows, self._prefix_of = rows, prefix_of
        self.maxsize = maxsize

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, token_ids: TokenIds) -> bool:
        return self._rows.get(self._prefix_of(token_ids)) is not None

    def __getitem__(self, token_ids: TokenIds) -> torch.Tensor:
        row = self._rows.get(self._prefix_of(token_ids))
        if row is None:
            raise KeyError(token_ids)
        return _as_tensor(row)

    def clear(self) -> None:
        """Remove all rows."""
        self._rows.clear()


@AsyncLM.register
class AsyncVirtualLM(EngineLM[torch.Tensor]):
    """A model in vLLM that returns next-token distributions; see `NextTokenLM` for its methods.

    Rows are float32 tensors on the CPU, which the caller may modify. vLLM schedules and batches the requests.
    By default, `sample` also ends at the model's EOS.

    Args:
        llm_engine: a `vllm.LLM` or `vllm.v1.engine.async_llm.AsyncLLM` that was created with
            `engine_options()`, any `vllm.LLM` that runs in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`),
            or an open `logprobe.LLM`. The caller keeps the ownership: `close` leaves the engine running and
            sets the attribute `llm_engine` to None, so that vLLM frees the engine when its owner deletes it.
        logprobs_capture: gets the rows of each result. In vLLM's in-process mode it is also one of vLLM's
            logits processors until `close`, and gets the rows of each step with random sampling.
        cache_size: maximum number of rows in the LRU cache; 0 disables the cache.
        cache_opts: genlm-backend's `move_to_cpu`, which has no effect here.
        batch_size: number of pending requests at which an idle engine starts a step immediately.
        timeout: seconds after which an idle engine starts a step for fewer requests. A busy engine takes
            requests immediately.

    Raises:
        MissingPackageError: vLLM is not installed (a subclass of `ImportError`).
        ParameterError: a setting is invalid, or the engine was created without our logits processor.
    """

    default_params: ClassVar[dict[str, Any]] = {
        "max_tokens": 1,
        "n": 1,
        "detokenize": False,
        "stop": None,
        "ignore_eos": True,
    }
    """vLLM sampling parameters as in genlm-backend; changing them has no effect."""

    _ignores_eos = False

    def __init__(
        self,
        llm_engine: Any,
        logprobs_capture: Capture | None = None,
        cache_size: int = 0,
        cache_opts: Mapping[str, Any] | None = None,
        batch_size: int = 20,
        timeout: float = 0.02,
        *,
        owns_engine: bool = False,
    ) -> None:
        _check_settings(cache_size, cache_opts, batch_size, timeout)
        loaded, is_made_here = _loaded(llm_engine, is_owned=owns_engine)
        self.llm_engine: Any = llm_engine
        self.logprobs_capture = logprobs_capture
        self._watchers = _join_watchers(llm_engine, logprobs_capture) if is_made_here else []
        limits = loaded.engine.capabilities()
        most_bytes = FLOAT_BYTES * limits.vocab_size + ID_BYTES * limits.max_model_len
        super().__init__(
            loaded,
            as_caller=_as_tensor,
            on_rows=None if logprobs_capture is None else _shown_to(logprobs_capture),
            cache=RowCache(cache_size * most_bytes, cache_size),
            batch_size=batch_size,
            timeout=timeout,
            owns_engine=owns_engine or is_made_here,
        )
        self._cache_size = cache_size

    @classmethod
    def from_name(
        cls, model_name: str | Path, engine_opts: Mapping[str, Any] | None = None, **settings: Any
    ) -> Self:
        """Load a model into vLLM, in separate processes or, if vLLM is configured so, in this process.

        Args:
            model_name: a known name, a folder or a Hugging Face id.
            engine_opts: vLLM's engine options, such as `tensor_parallel_size` or `enable_lora`; the defaults
                enable prefix caching, disable statistics and set `gpu_memory_utilization` to 0.9.
            settings: `cache_size`, `cache_opts`, `batch_size` and `timeout`.

        Raises:
            MissingPackageError: vLLM is not installed; a subclass of `ImportError`.
            ModelError: the model cannot be loaded.
            ParameterError: a setting is invalid, or vLLM rejects an option.
        """
        from logprobe.processors import GlobalLogprobsCapture

        _need_vllm()
        known = ("cache_opts", "cache_size", "batch_size", "timeout")
        for name in settings.keys() - set(known):
            raise UnknownParameterError(name, known, of="AsyncVirtualLM")
        _check_settings(**settings)
        from logprobe.integrations.vllm.existing import new_llm, runs_here
        from logprobe.integrations.vllm.start import start_vllm_engine

        config = _config(model_name, engine_opts)
        if runs_here():
            return cls(new_llm(config), GlobalLogprobsCapture(), **settings, owns_engine=True)
        loaded = start_vllm_engine(config)
        try:
            return cls(loaded, GlobalLogprobsCapture(), **settings, owns_engine=True)
        except BaseException:
            loaded.engine.close()
            raise

    @staticmethod
    def engine_options(
        model_name: str | Path, engine_opts: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return options for an engine that this class can use, as in `vllm.LLM(**options)`.

        Raises:
            MissingPackageError: vLLM is not installed; a subclass of `ImportError`.
            ModelError: the model cannot be loaded.
            ParameterError: an option is unknown or cannot be set.
        """
        _need_vllm()
        from logprobe.integrations.vllm.existing import options_of

        return options_of(_config(model_name, engine_opts))

    @property
    def cache(self) -> KeptRows | None:
        """The row cache as a map from token ids; None if `cache_size` is 0."""
        return KeptRows(self._cache, self._prefix_of, self._cache_size) if self._cache_size else None

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[TokenIds], *, lora: str | None = None, use_cache: bool = False
    ) -> torch.Tensor:
        """Call `batch_next_token_logprobs` and wait for the result; by default the row cache is not used."""
        return super().batch_next_token_logprobs_sync(token_ids_list, lora=lora, use_cache=use_cache)

    @staticmethod
    def hash_to_int(value: str) -> int:
        """Return vLLM's id for a LoRA adapter name, in [1, 2**31 - 1] and the same in every process."""
        return stable_id(value)

    def close(self) -> None:
        """Fail requests in flight and release the engine; later requests raise. May be called twice."""
        super().close()
        if self.logprobs_capture is not None:
            self.logprobs_capture.clear()
            if self.logprobs_capture in self._watchers:
                self._watchers.remove(self.logprobs_capture)
        self.llm_engine, self._watchers = None, []

    def _prefix_of(self, token_ids: TokenIds) -> Prefix:
        """Return the cache key of token ids with the current LoRA adapter."""
        lora = self._chosen_lora(None)
        return Prefix(lora, *self._source.loads(lora), self._as_prompt(token_ids).tobytes())


def _as_tensor(rows: npt.NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(rows) if rows.flags.writeable else torch.tensor(rows)


def _shown_to(capture: Capture) -> Callable[[list[Row]], object]:
    """Return a function that passes the rows of a result to a capture."""
    keep = getattr(capture, "keep", None)
    return partial(_apply, capture) if keep is None else lambda rows: keep([_as_tensor(row) for row in rows])


def _apply(capture: Capture, rows: list[Row]) -> None:
    """Pass log-probabilities to a capture as the logits of a step; log-softmax leaves them unchanged."""
    capture.clear()
    if rows:
        capture.apply(torch.from_numpy(np.stack(rows)))


def _join_watchers(llm_engine: Any, capture: Capture | None) -> list[Any]:
    """Add a capture to vLLM's processors in this process; return their list if it was added, else []."""
    from logprobe.integrations.vllm.existing import watchers

    joined = watchers(llm_engine)
    if capture is None or capture in joined:
        return []
    joined.append(capture)
    return joined


def _check_settings(
    cache_size: int = 0,
    cache_opts: Mapping[str, Any] | None = None,
    batch_size: int = 20,
    timeout: float = 0.02,
) -> None:
    """Raise `ParameterError` for invalid settings, before a model is loaded."""
    check_batching(batch_size=batch_size, timeout=timeout)
    is_count = isinstance(cache_size, int) and not isinstance(cache_size, bool) and cache_size >= 0
    require(is_count, "cache_size", f"must be an integer >= 0 (0 disables the cache), got {cache_size!r}")
    for name in cache_opts or {}:
        if name not in CACHE_OPTIONS:
            raise UnknownParameterError(name, CACHE_OPTIONS, of="cache_opts")


def _need_vllm() -> None:
    if find_spec("vllm") is None:
        raise MissingPackageError(MISSING)


def _config(model_name: str | Path, engine_opts: Mapping[str, Any] | None) -> EngineConfig:
    options = ENGINE_DEFAULTS | dict(engine_opts or {})
    return EngineConfig(engine="vllm", model=os.fspath(model_name), engine_options=options)


def _loaded(llm_engine: Any, *, is_owned: bool) -> tuple[LoadedModel, bool]:
    """Return an engine as a `LoadedModel`, and True if this call wrapped it."""
    loaded: Any = getattr(llm_engine, "_loaded", llm_engine)
    if hasattr(loaded, "engine") and hasattr(loaded, "text"):
        return loaded, False
    _need_vllm()
    from logprobe.integrations.vllm.existing import existing_engine

    return existing_engine(llm_engine, is_owned=is_owned), True
