"""What a front needs to say yes to a request: an engine process's limits, processors' arguments, LoRA names.

Before it: requests. After it: messages to engine processes, which take what was admitted as it is.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from logprobe.engine.request import check_request
from logprobe.errors import ParameterError, require, shortened
from logprobe.processors.registry import load_processor
from logprobe.processors.stages import Stages
from logprobe.sampling import SamplingParams
from logprobe.transport.codec import Codec, UnreadableError
from logprobe.transport.messages import Admitted, LoraNumber, Submit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logprobe.config import EngineConfig
    from logprobe.engine.backends.process.orders import LoadLora
    from logprobe.engine.protocol import Capabilities
    from logprobe.processors import ModelFacts
    from logprobe.transport.messages import Request


class Admission:
    """Says yes to requests as an engine of this process would; any thread may ask."""

    def __init__(
        self, config: EngineConfig, capabilities: Capabilities, model: ModelFacts, loras: LoraNames
    ) -> None:
        self._capabilities = capabilities
        self._stages = Stages.build(config, model)
        self._loras = loras
        self._codec: Codec[Any] = Codec(Submit)
        self._crossing: SamplingParams | None = None  # were read; most requests of a call have the same
        self.weights_number = 0  # of the load of the model's weights that answers

    def admit(self, request: Request) -> Admitted:
        """Say yes to a request, once and for all.

        Raises:
            ParameterError: it can never be served.
        """
        limits = self._capabilities
        check_request(request, max_len=limits.max_model_len, vocab_size=limits.vocab_size)
        lora = None if request.lora is None else self._loras.get(request.lora)
        admitted = Admitted(request, self._stages.admit(request.params), lora, self.weights_number)
        self._check_crosses(admitted)
        return admitted

    def _check_crosses(self, admitted: Admitted) -> None:
        """Read a request as an engine process will: what cannot be read there is refused here."""
        params = admitted.request.params
        try:
            data = self._codec.encode(Submit((admitted,)))
            if params is not self._crossing:
                self._codec.decode(data)
        except (ParameterError, UnreadableError) as error:
            own = error.parameter if isinstance(error, ParameterError) else "params"
            name = _at_fault(params) or own
            message = f"cannot cross to the engine's process: {str(error).removeprefix(f'{own}: ')}"
            raise ParameterError(name, message) from error
        self._crossing = params


def _at_fault(params: SamplingParams) -> str | None:
    """The first field that cannot cross by itself."""
    kinds = get_type_hints(SamplingParams)
    for field in fields(params):
        codec: Codec[Any] = Codec(kinds[field.name])
        try:
            codec.decode(codec.encode(getattr(params, field.name)))
        except (ParameterError, UnreadableError):
            return field.name
    return None


class LoraNames:
    """Name → number of the LoRA weights that requests may use; each load has a number of its own."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._loaded: dict[str, tuple[LoraNumber, LoadLora]] = {}  # guarded by `_lock`
        self._dropped: deque[int] = deque()

    def next_number(self) -> int:
        """A number that no weights have had."""
        return next(self._numbers)

    def add(self, load: LoadLora) -> None:
        """Make weights known that every engine process has; a name known already stands for them now."""
        with self._lock:
            self._loaded[load.name] = (self._number_of(load), load)

    def renumbered(self) -> list[LoadLora]:
        """What is known, under numbers that no weights have had."""
        return [msgspec.structs.replace(load, number=self.next_number()) for load in self.all()]

    def replace(self, loads: Iterable[LoadLora]) -> None:
        """Let names stand for these; those that were removed meanwhile are dropped."""
        with self._lock:
            for load in loads:
                lora = self._number_of(load)
                if load.name in self._loaded:
                    self._loaded[load.name] = (lora, load)

    def _number_of(self, load: LoadLora) -> LoraNumber:
        lora = LoraNumber(load.number)
        # Once no request to come names them; whoever lets go last may hold any lock, so it is only noted.
        weakref.finalize(lora, self._dropped.append, load.number)
        return lora

    def get(self, name: str) -> LoraNumber:
        """What a name stands for now.

        Raises:
            ParameterError: no such weights.
        """
        with self._lock:
            known, asked = ", ".join(self._loaded) or "none", shortened(name)
            require(name in self._loaded, "lora", f"no LoRA weights {asked!r} are loaded; known: {known}")
            return self._loaded[name][0]

    def remove(self, name: str) -> None:
        """Refuse them to new requests; errors as `get`."""
        self.get(name)
        with self._lock:
            self._loaded.pop(name, None)

    def all(self) -> list[LoadLora]:
        """What is known, as an engine process that starts must load it."""
        with self._lock:
            return [load for _, load in self._loaded.values()]

    def take_dropped(self) -> list[int]:
        """The numbers that no request to come names, each once."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


def processor_names(given: tuple[str | type, ...] | list[str | type]) -> tuple[str, ...]:
    """Processors as another process finds them.

    Raises:
        ParameterError: one that cannot be found there, or whose results could not be read here.
    """
    from logprobe.processors.builtin.capture import CaptureLogitsProcessor, GlobalLogprobsCapture

    where, names = "logits_processors", []
    for one in given:
        found = load_processor(one)
        is_readable = not issubclass(found, CaptureLogitsProcessor | GlobalLogprobsCapture)
        own = f"{found.__name__} keeps rows in the engine's process; use it without process"
        require(is_readable, where, own)
        if isinstance(one, str):
            names.append(one)
            continue
        is_named = found.__module__ != "__main__" and found.__qualname__.isidentifier()
        if not is_named:
            remedy = "write it in a module and give module.path:ClassName"
            raise ParameterError(where, f"{found.__qualname__} has no name in another process; {remedy}")
        names.append(f"{found.__module__}:{found.__qualname__}")
    return tuple(names)
