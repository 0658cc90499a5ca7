"""`Weights`: methods in `NextTokenLM` that load and select LoRA adapters and replace the model's weights."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from logprobe.errors import ParameterError, require
from logprobe.models.lora import resolved_folder
from logprobe.next_token.base import BaseLM

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from logprobe.engine.front import OnRunning


class Weights(BaseLM):
    """Loading and selection of LoRA adapters, and replacement of the model's weights."""

    def set_lora(
        self,
        path: str | Path | None = None,
        name: str = "lora_1",
        *,
        lora_path: str | Path | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Set the default LoRA adapter for later requests; requests in flight are not affected.

        `lora_path` and `lora_name` are genlm-backend's names for `path` and `name`.

        Raises:
            ParameterError: no adapter with this name is loaded, or it was loaded from another path.
        """
        path, name = lora_path if path is None else path, lora_name or name
        self._source.loads(name)
        loaded_from = self._source.list_loras()[name]
        is_same = path is None or loaded_from in {str(path), str(resolved_folder(path))}
        require(is_same, "path", f"lora {name!r} was loaded from {loaded_from}, not from {path}")
        self._lora = name

    def clear_lora(self) -> None:
        """Make the base model the default again."""
        self._lora = None

    def list_loras(self) -> dict[str, str]:
        """Return the loaded LoRA adapters as a map from name to path."""
        return self._source.list_loras()

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a folder; select it with `set_lora` or `lora=`.

        Loading the same name again replaces the adapter; requests in flight keep the old one.

        Raises:
            ModelError: the folder cannot be read, or the adapter does not fit the model.
            ParameterError: the model runs on a server.
        """
        self._loaded.engine.add_lora(name, path)

    def add_new_lora(
        self,
        path: str | Path | None = None,
        name: str = "lora_1",
        *,
        lora_path: str | Path | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Call `add_lora`; genlm-backend's signature is `add_new_lora(lora_path, lora_name="lora_1")`."""
        given = lora_path if path is None else path
        if given is None:
            raise ParameterError("path", "is missing; pass the folder of the LoRA weights")
        self.add_lora(lora_name or name, given)

    def remove_lora(self, name: str) -> None:
        """Unload a LoRA adapter; requests in flight that use it still finish.

        Raises:
            ParameterError: no adapter with this name is loaded, or the model runs on a server.
        """
        self._loaded.engine.remove_lora(name)

    async def load_weights(
        self,
        weights: str | Path | Mapping[str, Any],
        *,
        version: str | None = None,
        on_running: OnRunning = "finish",
    ) -> str:
        """Async version of `LLM.load_weights`; cached rows from the old weights are not used afterwards.

        Raises:
            ModelError: the weights cannot be loaded; the old ones stay in use.
            ParameterError: an argument is invalid, or the model runs on a server.
        """
        from logprobe.engine.front import check_on_running

        self._check_open()
        engine, finishes = self._loaded.engine, check_on_running(on_running)
        return await asyncio.to_thread(engine.load_weights, weights, version=version, finishes=finishes)
