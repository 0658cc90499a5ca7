"""`AsyncLM`: async access to whole next-token distributions, one per prefix.

It is made for inference algorithms that track many prefixes at once: concurrent requests share engine steps,
equal requests are computed once, and a prefix that extends a cached prefix by one token costs one token.
"""

from __future__ import annotations

import os
from abc import ABC
from typing import TYPE_CHECKING, Any, Protocol, Self

from logprobe.config import EngineConfig
from logprobe.errors import UnknownParameterError, require
from logprobe.next_token.batcher import check_batching
from logprobe.next_token.engine_lm import EngineLM
from logprobe.next_token.lm import DEFAULT_CACHE_BYTES
from logprobe.next_token.rows import Row, RowCache

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Unpack

    from logprobe.config import EngineSettings
    from logprobe.engine.backends.start import LoadedModel


class OpenModel(Protocol):
    """An object with a loaded model, such as `LLM`."""

    @property
    def _loaded(self) -> LoadedModel:
        """The engine and the tokenizer."""


class AsyncLM(EngineLM[Row], ABC):
    """A model in this process that returns next-token distributions; see `NextTokenLM` for its methods.

    Args:
        model: a name or path as in `EngineConfig.model`, or an open `LLM`, whose engine, processors, LoRA
            adapters and prefix cache are shared. For the result of `LLM.with_lora`, that adapter is the
            default.
        cache_bytes: size of the LRU cache of whole-vocabulary rows, in bytes; 0 disables the cache.
        batch_size: number of pending requests at which an idle engine starts a step immediately.
        timeout: seconds after which an idle engine starts a step with fewer requests; a busy engine takes
            requests immediately.
        owns_engine: whether `close` also closes the engine; the default is True if `model` is a name.
        settings: other keywords of `EngineConfig`, if `model` is a name.

    Raises:
        ModelError: the model cannot be loaded.
        ParameterError: a setting is invalid.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | OpenModel = "smollm2",
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        batch_size: int = 64,
        timeout: float = 0.001,
        owns_engine: bool | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        cache = RowCache(cache_bytes)  # validates before the model is loaded
        check_batching(batch_size=batch_size, timeout=timeout)
        loaded = _loaded(model, settings)
        super().__init__(
            loaded,
            as_caller=lambda rows: rows,
            cache=cache,
            batch_size=batch_size,
            timeout=timeout,
            owns_engine=isinstance(model, str | os.PathLike) if owns_engine is None else owns_engine,
        )
        lora = getattr(model, "lora", None)
        if lora is not None:
            self.set_lora(lora)

    @classmethod
    def from_name(
        cls,
        model: str | Path = "smollm2",
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        batch_size: int = 64,
        timeout: float = 0.001,
        **settings: Unpack[EngineSettings],
    ) -> Self:
        """Load a model by name and start its engine; `settings` are keywords of `EngineConfig`.

        Raises:
            ModelError: the model cannot be loaded.
            ParameterError: a setting is invalid.
        """
        require(isinstance(model, str | os.PathLike), "model", "must be a name or a path", got=model)
        return cls(model, cache_bytes=cache_bytes, batch_size=batch_size, timeout=timeout, **settings)


def _loaded(model: str | Path | LoadedModel | OpenModel, settings: EngineSettings) -> LoadedModel:
    """Load a model and start its engine if `model` is a name; otherwise return the loaded model."""
    if isinstance(model, str | os.PathLike):
        from logprobe.engine.backends.start import start_engine

        return start_engine(EngineConfig(model=os.fspath(model), **settings))
    loaded: Any = getattr(model, "_loaded", model)
    is_open = hasattr(loaded, "engine") and hasattr(loaded, "text")
    require(is_open, "model", "must be a name, a path or an open LLM", got=model)
    for name in settings:
        raise UnknownParameterError(name, ("batch_size", "cache_bytes", "timeout"), of="AsyncLM of an LLM")
    return loaded  # type: ignore[no-any-return]
