"""`AsyncLM`: the async front door, one whole next-token distribution a prefix.

For inference algorithms that hold many prefixes at once: concurrent asks share engine steps, equal ones share
one computation, and a prefix one token longer than a known one costs one token. After it: `next_token`, which
holds rows and asks, and the engine.
"""

from __future__ import annotations

import os
from abc import ABC
from typing import TYPE_CHECKING, Any, Protocol, Self

from logprobe.config import EngineConfig
from logprobe.errors import UnknownParameterError, require
from logprobe.next_token.batcher import check_batching
from logprobe.next_token.lm import DEFAULT_CACHE_BYTES, NextTokenLM
from logprobe.next_token.rows import Row, RowCache
from logprobe.next_token.source import EngineRows

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.engine.backends.start import LoadedModel


class OpenModel(Protocol):
    """A front door that holds a model open, such as `LLM`."""

    @property
    def loaded(self) -> LoadedModel:
        """The engine, with its text edge."""


class AsyncLM(NextTokenLM[Row], ABC):
    """A model of this process asked for next-token distributions; see `NextTokenLM` for all that it answers.

    Args:
        model: a name, as `EngineConfig.model`; or an open `LLM`, whose engine it then shares, and whose
            processors, LoRA weights and known prefixes too; of a view (`LLM.with_lora`), asks that name no
            LoRA weights have its.
        cache_bytes: bytes of rows that are kept whole, least recently used out first; 0 keeps none.
        batch_size: asks that start a step at once where the engine is idle.
        timeout: seconds after which the first of fewer asks starts a step; a busy engine takes asks at once.
        owns_engine: whether `cleanup` closes the engine too; by default where it was started here.
        settings: of a model by name, the other fields of `EngineConfig`.

    Raises:
        ModelError: the model cannot be had or used.
        ParameterError: a setting that cannot be used.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | OpenModel = "smollm2",
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        batch_size: int = 64,
        timeout: float = 0.001,
        owns_engine: bool | None = None,
        **settings: Any,
    ) -> None:
        cache = RowCache(cache_bytes)  # refused before the model is loaded
        check_batching(batch_size=batch_size, timeout=timeout)
        loaded = _loaded(model, settings)
        super().__init__(
            EngineRows(loaded),
            loaded.text,
            as_caller=lambda rows: rows,
            cache=cache,
            batch_size=batch_size,
            timeout=timeout,
            owns_source=isinstance(model, str | os.PathLike) if owns_engine is None else owns_engine,
        )
        lora = getattr(model, "lora", None)
        if lora is not None:
            self.set_lora(name=lora)

    @classmethod
    def from_name(
        cls,
        model: str | Path = "smollm2",
        *,
        engine: str = "native",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        batch_size: int = 64,
        timeout: float = 0.001,
        **settings: Any,
    ) -> Self:
        """Load a model and start its engine; `settings` are those of `EngineConfig`.

        Raises:
            ModelError: the model cannot be had or used.
            ParameterError: a setting that cannot be used.
        """
        require(isinstance(model, str | os.PathLike), "model", "must be a name or a path", got=model)
        return cls(
            model, cache_bytes=cache_bytes, batch_size=batch_size, timeout=timeout, engine=engine, **settings
        )


def _loaded(model: str | Path | LoadedModel | OpenModel, settings: dict[str, Any]) -> LoadedModel:
    """An engine of its own for a name; what is open stays as it is."""
    if isinstance(model, str | os.PathLike):
        from logprobe.engine.backends.start import start_engine

        return start_engine(EngineConfig(model=os.fspath(model), **settings))
    loaded: Any = getattr(model, "loaded", model)
    is_open = hasattr(loaded, "engine") and hasattr(loaded, "text")
    require(is_open, "model", "must be a name, a path or an open LLM", got=model)
    for name in settings:
        raise UnknownParameterError(name, ("batch_size", "cache_bytes", "timeout"), of="AsyncLM of an LLM")
    return loaded  # type: ignore[no-any-return]
