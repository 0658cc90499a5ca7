"""`EngineLM`: a `NextTokenLM` whose rows come from an engine, with control of its weights and caches."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic

from logprobe.engine.front import check_on_running
from logprobe.next_token.lm import NextTokenLM
from logprobe.next_token.rows import ArrayT
from logprobe.next_token.source import EngineRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from logprobe.engine.backends.start import LoadedModel
    from logprobe.engine.front import OnRunning
    from logprobe.next_token.rows import Row, RowCache


class EngineLM(NextTokenLM[ArrayT], Generic[ArrayT]):
    """A model in an engine of this program; see `NextTokenLM` for the other arguments.

    Args:
        loaded: the engine and the model's tokenizer.
        owns_engine: True if `close` also closes the engine.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        as_caller: Callable[[npt.NDArray[np.float32]], ArrayT],
        on_rows: Callable[[list[Row]], object] | None = None,
        cache: RowCache,
        batch_size: int,
        timeout: float,
        owns_engine: bool,
    ) -> None:
        super().__init__(
            EngineRows(loaded),
            loaded.text,
            as_caller=as_caller,
            on_rows=on_rows,
            cache=cache,
            batch_size=batch_size,
            timeout=timeout,
            owns_source=owns_engine,
        )
        self._loaded = loaded

    @property
    def underlying_model(self) -> Any:
        """The transformers or vLLM module; None if the model runs in another process.

        If the model was loaded without this module, because an earlier load verified the model, the module is
        loaded on first access.
        """
        load = self._loaded.load_module
        return None if load is None else load()

    def clear_kv_cache(self) -> None:
        """Clear the engine's prefix cache, except prefixes that running requests use."""
        self._loaded.engine.forget_prefixes()

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a folder; select it with `set_lora` or `lora=`.

        Loading the same name again replaces the adapter; requests in flight keep the old adapter.

        Raises:
            ModelError: the folder cannot be read, or the adapter does not fit the model.
        """
        self._loaded.engine.add_lora(name, path)

    def remove_lora(self, name: str) -> None:
        """Unload a LoRA adapter; requests in flight that use it still finish.

        Raises:
            ParameterError: no adapter with this name is loaded.
        """
        self._loaded.engine.remove_lora(name)

    async def load_weights(
        self,
        weights: str | Path | Mapping[str, Any],
        *,
        version: str | None = None,
        on_running: OnRunning = "finish",
    ) -> str:
        """Replace the model's weights as `LLM.load_weights` does; rows of the old weights are not reused.

        Raises:
            ModelError: the weights cannot be loaded; the old weights stay in use.
            ParameterError: an argument is invalid.
        """
        self._check_open()
        engine, finishes = self._loaded.engine, check_on_running(on_running)
        return await asyncio.to_thread(engine.load_weights, weights, version=version, finishes=finishes)
