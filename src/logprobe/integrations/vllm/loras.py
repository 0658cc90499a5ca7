"""LoRA adapters in vLLM: converts this library's load commands to vLLM's `LoRARequest`s."""

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
    """The loaded adapters; used only on vLLM's event loop."""

    def __init__(self, llm: Any, device: str) -> None:
        self._llm = llm
        self._is_enabled = llm.vllm_config.lora_config is not None
        # On a CPU, vLLM's LoRA head confuses prompt rows with the rows of the batch, and the worker raises.
        self.spoils_prompts = self._is_enabled and device == "cpu"
        # On a CPU, a row without an adapter uses the last slot, which must stay empty.
        self._limit = llm.vllm_config.lora_config.max_loras - 1 if self.spoils_prompts else None
        self.removals: list[asyncio.Future[Any]] = []  # to be awaited before vLLM is shut down
        self._loads: dict[int, LoadLora] = {}
        # distinguishes adapters from those of other wrappers of the same vLLM engine
        self._prefix = uuid.uuid4().hex[:8]

    async def load(self, load: LoadLora) -> None:
        """Load an adapter from a folder.

        Raises:
            ModelError: the folder cannot be read, or does not match the model.
            ParameterError: vLLM was started without LoRA, or has no free slot.
        """
        remedy = "is not enabled in this engine; start it with engine_options={'enable_lora': True}"
        require(self._is_enabled, "lora", remedy)
        if not (Path(load.path) / "adapter_config.json").is_file():
            raise ModelError(f"{load.path}: has no adapter_config.json; give the folder of the LoRA adapter")
        fits = self._limit is None or len(self._loads) < self._limit
        more = f"at most {self._limit} adapters can be loaded at once; raise max_loras in engine_options"
        require(fits, "lora", more)
        self._loads[load.number] = load  # reserve the slot while vLLM loads the adapter
        try:
            await self._llm.add_lora(self._request(load))
        except BaseException as error:
            del self._loads[load.number]
            if isinstance(error, Exception):
                raise ModelError(f"{load.path}: vLLM cannot load this LoRA adapter: {error}") from error
            raise

    def request_of(self, admitted: Admitted) -> Any:
        """Return the `LoRARequest` for an admitted request; None if the request uses no adapter."""
        return self._request(self._loads[admitted.lora_number]) if admitted.lora_number else None

    def drop(self, number: int) -> None:
        """Remove from vLLM the adapter with this load number; no request uses the adapter any more."""
        self.removals = [removal for removal in self.removals if not removal.done()]
        request = self._request(self._loads.pop(number))
        self.removals.append(asyncio.ensure_future(self._llm.remove_lora(request.lora_int_id)))

    def _request(self, load: LoadLora) -> Any:
        """Return a `LoRARequest` with a name and id that are unique for this load.

        vLLM keys its prefix cache by the name, and adapters by the id.
        """
        from vllm.lora.request import LoRARequest

        name = f"{load.name}#{self._prefix}-{load.number}"
        return LoRARequest(name, stable_id(name), load.path)
