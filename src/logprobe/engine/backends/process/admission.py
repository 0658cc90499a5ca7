"""Validates requests for an engine process: lengths, token ids, and arguments of logits processors.

Engine processes do not validate the requests again.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints

from logprobe.engine.plan.capture import check_capture
from logprobe.engine.request import check_request
from logprobe.errors import ParameterError, require
from logprobe.processors.registry import load_processor
from logprobe.processors.stages import Stages
from logprobe.sampling import SamplingParams
from logprobe.transport.codec import Codec, UnreadableError
from logprobe.transport.messages import Admitted, Submit

if TYPE_CHECKING:
    from logprobe.config import EngineConfig
    from logprobe.engine.protocol import Capabilities
    from logprobe.processors import ModelFacts
    from logprobe.transport.messages import Request


class Admission:
    """Validates requests in the same way as an engine in this process; thread-safe."""

    def __init__(self, config: EngineConfig, capabilities: Capabilities, model: ModelFacts) -> None:
        self._capabilities = capabilities
        self._stages = Stages.build(config, model)
        self._codec: Codec[Any] = Codec(Submit)
        self._crossing: SamplingParams | None = None  # params checked last; many requests share theirs

    def admit(self, request: Request) -> Admitted:
        """Validate a request.

        Raises:
            ParameterError: the request can never be served.
        """
        limits = self._capabilities
        check_request(request, max_len=limits.max_model_len, vocab_size=limits.vocab_size)
        if request.params.captures or request.lens is not None:
            check_capture(request, limits.shape, max_len=limits.max_model_len)
        admitted = Admitted(request, self._stages.admit(request.params))
        self._check_crosses(admitted)
        return admitted

    def _check_crosses(self, admitted: Admitted) -> None:
        """Encode and decode a request, and reject it if an engine process could not decode it."""
        params = admitted.request.params
        try:
            data = self._codec.encode(Submit((admitted,)))
            if params is not self._crossing:
                self._codec.decode(data)
        except (ParameterError, UnreadableError) as error:
            own = error.parameter if isinstance(error, ParameterError) else "params"
            name = _at_fault(params) or own
            message = f"cannot be sent to the engine process: {str(error).removeprefix(f'{own}: ')}"
            raise ParameterError(name, message) from error
        self._crossing = params


def _at_fault(params: SamplingParams) -> str | None:
    """Return the name of the first field that cannot be encoded and decoded; None if there is none."""
    kinds = get_type_hints(SamplingParams)
    for field in fields(params):
        codec: Codec[Any] = Codec(kinds[field.name])
        try:
            codec.decode(codec.encode(getattr(params, field.name)))
        except (ParameterError, UnreadableError):
            return field.name
    return None


def processor_names(processors: tuple[str | type, ...] | list[str | type]) -> tuple[str, ...]:
    """Return the names by which another process can import the processors.

    Raises:
        ParameterError: another process cannot import a processor, or a processor collects results, which
            would stay in that process.
    """
    from logprobe.processors.builtin.capture import CaptureLogitsProcessor, GlobalLogprobsCapture

    where, names = "logits_processors", []
    for processor in processors:
        cls = load_processor(processor)
        is_readable = not issubclass(cls, CaptureLogitsProcessor | GlobalLogprobsCapture)
        own = f"{cls.__name__} keeps rows in the engine's process; use it with process=False"
        require(is_readable, where, own)
        if isinstance(processor, str):
            names.append(processor)
            continue
        is_named = cls.__module__ != "__main__" and cls.__qualname__.isidentifier()
        if not is_named:
            remedy = "define it in a module and pass module.path:ClassName"
            raise ParameterError(where, f"{cls.__qualname__} cannot be imported in another process; {remedy}")
        names.append(f"{cls.__module__}:{cls.__qualname__}")
    return tuple(names)
