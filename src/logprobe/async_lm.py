"""`AsyncLM`: the async front door, one whole next-token distribution a prefix.

For inference algorithms that hold many prefixes at once: concurrent asks share engine steps, equal ones share
one computation, and a prefix one token longer than a known one costs one token. After it: `next_token`, which
holds rows and asks, and the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from logprobe.config import EngineConfig
from logprobe.errors import ParameterError, require
from logprobe.next_token.lm import DEFAULT_CACHE_BYTES, NextTokenLM
from logprobe.next_token.rows import RowCache

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.engine.backends.start import LoadedModel

ENGINES = ("native",)


class AsyncLM(NextTokenLM):
    """A model of this process asked for next-token distributions; see `NextTokenLM` for all that it answers.

    Args:
        loaded: the engine, with its text edge.
        cache_bytes: bytes of rows that are kept whole, least recently used out first; 0 keeps none.
        batch_size: asks that start a step at once where the engine is idle.
        timeout: seconds after which the first of fewer asks starts a step; a busy engine takes asks at once.
        owns_engine: whether `cleanup` closes the engine too.

    Raises:
        ParameterError: a setting that cannot be used.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        batch_size: int = 64,
        timeout: float = 0.001,
        owns_engine: bool = False,
    ) -> None:
        super().__init__(
            loaded, cache_bytes=cache_bytes, batch_size=batch_size, timeout=timeout, owns_engine=owns_engine
        )
        self._loaded = loaded

    @classmethod
    def from_name(
        cls,
        model: str = "smollm2",
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
        from logprobe.engine.backends.start import start_native_engine

        require(engine in ENGINES, "engine", f"must be one of {', '.join(ENGINES)}, got {engine!r}")
        RowCache(cache_bytes)  # refused before the model is loaded
        loaded = start_native_engine(EngineConfig(model=model, **settings))
        try:
            return cls(
                loaded, cache_bytes=cache_bytes, batch_size=batch_size, timeout=timeout, owns_engine=True
            )
        except ParameterError:
            loaded.engine.close()
            raise

    def add_new_lora(self, path: str | Path, name: str = "lora_1") -> None:
        """Load a LoRA adapter from a local folder; `set_lora` or `lora=` then use it.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
            ParameterError: the name is, or was, another adapter's.
        """
        self._loaded.engine.add_lora(name, path)

    def remove_lora(self, name: str) -> None:
        """Refuse new asks for an adapter; those in flight end as they would have, its name is not used again.

        Raises:
            ParameterError: no such adapter.
        """
        self._loaded.engine.remove_lora(name)

    def clear_kv_cache(self) -> None:
        """Let the engine forget every prefix that no request stands on."""
        self._loaded.engine.forget_prefixes()

    @property
    def underlying_model(self) -> Any:
        """The transformers module; None where the model lives in another process."""
        return self._loaded.model
