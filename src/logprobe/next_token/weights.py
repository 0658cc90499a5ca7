"""`Weights`: the methods of `NextTokenLM` that load and select LoRA weights, and replace the model's own."""

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
    """LoRA weights by name, and the model's own."""

    def set_lora(
        self,
        path: str | Path | None = None,
        name: str = "lora_1",
        *,
        lora_path: str | Path | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Answer asks that name no LoRA weights by these; those already asked keep theirs.

        `lora_path` and `lora_name` are genlm-backend's names for the two.

        Raises:
            ParameterError: no weights of that name are loaded, or they came from another path.
        """
        path, name = lora_path if path is None else path, lora_name or name
        self._source.loads(name)
        loaded_from = self._source.list_loras()[name]
        is_same = path is None or loaded_from in {str(path), str(resolved_folder(path))}
        require(is_same, "path", f"lora {name!r} came from {loaded_from}, not from {path}")
        self._lora = name

    def clear_lora(self) -> None:
        """Answer asks that name no LoRA weights by the base model."""
        self._lora = None

    def list_loras(self) -> dict[str, str]:
        """The loaded LoRA weights: name → path."""
        return self._source.list_loras()

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load LoRA weights from a folder; `set_lora` or `lora=` then use them.

        A name that is loaded again stands for the new weights; rows that were begun keep theirs.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
            ParameterError: the model is a server's.
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
        """`add_lora` in genlm-backend's words: `add_new_lora(lora_path, lora_name="lora_1")`."""
        given = lora_path if path is None else path
        if given is None:
            raise ParameterError("path", "is missing; name the folder with the LoRA weights")
        self.add_lora(lora_name or name, given)

    def remove_lora(self, name: str) -> None:
        """Refuse new asks for LoRA weights; those in flight end as they would have.

        Raises:
            ParameterError: no such weights, or the model is a server's.
        """
        self._loaded.engine.remove_lora(name)

    async def load_weights(
        self,
        weights: str | Path | Mapping[str, Any],
        *,
        version: str | None = None,
        on_running: OnRunning = "finish",
    ) -> str:
        """`LLM.load_weights` for callers in an event loop; rows that are kept are of no use after it.

        Raises:
            ModelError: as there; the old weights go on.
            ParameterError: as there, or the model is a server's.
        """
        from logprobe.engine.front import check_on_running

        self._check_open()
        engine, finishes = self._loaded.engine, check_on_running(on_running)
        return await asyncio.to_thread(engine.load_weights, weights, version=version, finishes=finishes)
