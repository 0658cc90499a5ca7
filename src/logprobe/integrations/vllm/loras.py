"""LoRA weights of vLLM: loads here, `LoRARequest`s there."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logprobe.errors import ModelError, require
from logprobe.models.lora import stable_id

if TYPE_CHECKING:
    from logprobe.transport.messages import Admitted, LoadLora


class VllmLoras:
    """What is loaded; touched on vLLM's event loop alone."""

    def __init__(self, llm: Any, device: str) -> None:
        self._llm = llm
        self._is_enabled = llm.vllm_config.lora_config is not None
        # Its head takes rows of prompts there for the rows of the batch, and the worker raises.
        self.spoils_prompts = self._is_enabled and device == "cpu"
        # A row without weights takes those of the last place there, which must stay empty.
        self._limit = llm.vllm_config.lora_config.max_loras - 1 if self.spoils_prompts else None
        self.removals: list[asyncio.Future[Any]] = []  # which vLLM must answer before it is shut down
        self._loads: dict[int, LoadLora] = {}
        self._prefix = uuid.uuid4().hex[:8]  # an engine that exists may have had another such owner before

    async def load(self, load: LoadLora) -> None:
        """Load weights from a folder.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
            ParameterError: vLLM was started without LoRA, or has no room for more.
        """
        remedy = "is not taken by this engine; start it with engine_options={'enable_lora': True}"
        require(self._is_enabled, "lora", remedy)
        if not (Path(load.path) / "adapter_config.json").is_file():
            raise ModelError(f"{load.path}: no adapter_config.json there; name the folder of LoRA weights")
        fits = self._limit is None or len(self._loads) < self._limit
        more = f"at most {self._limit} LoRA weights fit at once; raise max_loras in engine_options"
        require(fits, "lora", more)
        self._loads[load.number] = load  # it has its place while vLLM reads it
        try:
            await self._llm.add_lora(self._request(load))
        except BaseException as error:
            del self._loads[load.number]
            if isinstance(error, Exception):
                raise ModelError(f"{load.path}: vLLM cannot load these LoRA weights: {error}") from error
            raise

    def request_of(self, admitted: Admitted) -> Any:
        """The `LoRARequest` of what a request was admitted with; None without weights."""
        return self._request(self._loads[admitted.lora_number]) if admitted.lora_number else None

    def drop(self, number: int) -> None:
        """Let vLLM drop what no request names any more."""
        self.removals = [removal for removal in self.removals if not removal.done()]
        request = self._request(self._loads.pop(number))
        self.removals.append(asyncio.ensure_future(self._llm.remove_lora(request.lora_int_id)))

    def _request(self, load: LoadLora) -> Any:
        """Each load has a name and a number of its own: vLLM keeps prefixes by one, weights by the other."""
        from vllm.lora.request import LoRARequest

        name = f"{load.name}#{self._prefix}-{load.number}"
        return LoRARequest(name, stable_id(name), load.path)
