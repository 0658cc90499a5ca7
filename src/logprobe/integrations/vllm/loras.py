"""LoRA weights of vLLM: names here, numbers there.

Before it: the front doors. After it: vLLM's `LoRARequest`s.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logprobe.engine.backends.process.orders import LoadLora
from logprobe.errors import ModelError, require
from logprobe.models.lora import stable_id

if TYPE_CHECKING:
    from logprobe.engine.backends.bridge import LoopThread
    from logprobe.engine.backends.process.admission import LoraNames
    from logprobe.transport.messages import Admitted


class VllmLoras:
    """What is loaded; each load of a name has a number of its own, so that vLLM caches them apart."""

    def __init__(self, llm: Any, bridge: LoopThread, names: LoraNames, device: str) -> None:
        self.names = names
        self._llm, self._bridge = llm, bridge
        self._is_enabled = llm.vllm_config.lora_config is not None
        # Its head takes rows of prompts there for the rows of the batch, and the worker raises.
        self.spoils_prompts = self._is_enabled and device == "cpu"
        # A row without weights takes those of the last place there, which must stay empty.
        self._limit = llm.vllm_config.lora_config.max_loras - 1 if self.spoils_prompts else None
        self._is_loading = threading.Lock()
        self.removals: list[asyncio.Future[Any]] = []  # which vLLM must answer before it is shut down
        self._loads: dict[int, LoadLora] = {}  # of weights that any request runs on
        self._prefix = uuid.uuid4().hex[:8]  # an engine that exists may have had another such owner before

    def add(self, name: str, path: str | Path) -> None:
        """Load weights from a folder, in place of any of that name.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
            ParameterError: vLLM was started without LoRA.
        """
        remedy = "is not taken by this engine; start it with engine_options={'enable_lora': True}"
        require(self._is_enabled, "lora", remedy)
        folder = Path(path).absolute()
        if not (folder / "adapter_config.json").is_file():
            raise ModelError(f"{folder}: no adapter_config.json there; name the folder of LoRA weights")
        with self._is_loading:
            fits = self._limit is None or len(self._loads) < self._limit
            more = f"at most {self._limit} LoRA weights fit at once; raise max_loras in engine_options"
            require(fits, "lora", more)
            load = LoadLora(self.names.next_number(), name, str(folder))
            try:
                self._bridge.run(self._llm.add_lora(self._request(load)))
            except Exception as error:
                raise ModelError(f"{folder}: vLLM cannot load these LoRA weights: {error}") from error
            self._loads[load.number] = load
            self.names.add(load)
        self._bridge.post(self.drop)

    def remove(self, name: str) -> None:
        """Refuse new requests for weights; they go once none runs on them.

        Raises:
            ParameterError: no such weights.
        """
        self.names.remove(name)
        self._bridge.post(self.drop)

    def request_of(self, admitted: Admitted) -> Any:
        """The `LoRARequest` of what a request was admitted with; None without weights."""
        return None if admitted.lora is None else self._request(self._loads[admitted.lora.number])

    def drop(self) -> None:
        """Let vLLM drop what no request to come names; on its event loop."""
        self.removals = [one for one in self.removals if not one.done()]
        for number in self.names.take_dropped():
            request = self._request(self._loads.pop(number))
            self.removals.append(asyncio.ensure_future(self._llm.remove_lora(request.lora_int_id)))

    def _request(self, load: LoadLora) -> Any:
        """Each load has a name and a number of its own: vLLM keeps prefixes by one, weights by the other."""
        from vllm.lora.request import LoRARequest

        name = f"{load.name}#{self._prefix}-{load.number}"
        return LoRARequest(name, stable_id(name), load.path)
