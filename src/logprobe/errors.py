"""Every error this library raises on purpose, in one tree.

::

    LogprobeError
    ├── ParameterError (ValueError)        a value the caller passed; `.parameter` names it
    │   ├── UnknownParameterError (TypeError)  a name that does not exist; says the nearest one
    │   └── PromptTooLongError                 more tokens than the model or the cache can ever hold
    ├── InputError (ValueError)            a file or text that cannot be read as asked
    ├── OutputError (OSError)              a file that cannot be written
    ├── ModelError                         a model that cannot be had or used
    │   ├── ModelNotFoundError (LookupError)   no such name, folder or file
    │   ├── DownloadError (OSError)            the weights could not be fetched or stored
    │   ├── ChecksumError                      what was fetched is not what was published
    │   └── UnsupportedModelError              the model needs what this engine does not do
    └── EngineError (RuntimeError)         the engine could not finish what it accepted
        ├── EngineClosedError                  asked after `close()`
        ├── ForwardError                       the model's forward pass raised
        ├── NonFiniteLogitsError               a row of logits held NaN, +inf, or only -inf
        ├── ProcessorError                     a logits processor failed a request; `.processor` names it
        ├── RequestAbortedError                the caller gave the request up
        ├── ServerError                        a server answered with a failure of its own, or too late
        │   └── UnreachableError (ConnectionError) no connection to it, or one that broke
        └── BatchError                         some requests of one call failed; holds all outputs

Each message names the thing at fault and the remedy, in one line.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class LogprobeError(Exception):
    """Root of all errors that this library raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By what it holds, not by the arguments it was made from: those differ from class to class.
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[LogprobeError], args: tuple[Any, ...]) -> LogprobeError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class ParameterError(LogprobeError, ValueError):
    """A parameter has a value that cannot be used; `.parameter` is its name."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


class UnknownParameterError(ParameterError, TypeError):
    """A parameter of that name does not exist; the message names the nearest that does."""

    def __init__(self, parameter: str, known: Iterable[str], *, of: str) -> None:
        known = sorted(known)
        near = get_close_matches(parameter, known, n=1, cutoff=0.7)
        remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        super().__init__(parameter, f"{of} has no such parameter; {remedy}")


class PromptTooLongError(ParameterError):
    """A prompt needs more tokens than the model's context or the cache can ever hold."""


class InputError(LogprobeError, ValueError):
    """A file or a text cannot be read as asked."""


class OutputError(LogprobeError, OSError):
    """A file cannot be written; what is there already is kept."""


class ModelError(LogprobeError):
    """A model cannot be had or used."""


class ModelNotFoundError(ModelError, LookupError):
    """No model of that name, folder or file."""


class DownloadError(ModelError, OSError):
    """The weights could not be fetched or stored."""


class ChecksumError(ModelError):
    """What was fetched is not what was published."""


class UnsupportedModelError(ModelError):
    """The model needs something that this engine does not do."""


class EngineError(LogprobeError, RuntimeError):
    """The engine could not finish something that it had accepted."""


class EngineClosedError(EngineError):
    """The engine was asked something after `close()`."""


class ForwardError(EngineError):
    """The model's forward pass raised; its own error is the cause."""


class NonFiniteLogitsError(EngineError):
    """A row of logits held NaN or +inf, or nothing but -inf."""


class ProcessorError(EngineError):
    """A logits processor failed one request; `.processor` is its name, its own error the cause."""

    def __init__(self, processor: str, message: str) -> None:
        super().__init__(f"{processor} {message}")
        self.processor = processor


class RequestAbortedError(EngineError):
    """The caller gave the request up before it ended."""


class ServerError(EngineError):
    """A server answered with a failure of its own, with what cannot be read, or not in time."""


class UnreachableError(ServerError, ConnectionError):
    """No connection to a server, or one that broke before the reply."""


class BatchError(EngineError):
    """Some requests of one call failed; `.outputs` holds every output, `.errors` the failures by index."""

    def __init__(self, outputs: Sequence[Any], errors: dict[int, LogprobeError]) -> None:
        listed = "; ".join(f"request {index}: {error}" for index, error in list(errors.items())[:5])
        more = f"; and {len(errors) - 5} more" if len(errors) > 5 else ""
        super().__init__(f"{len(errors)} of {len(outputs)} requests failed: {listed}{more}")
        self.outputs = outputs
        self.errors = errors


def require(condition: object, parameter: str, message: str) -> None:
    """Raise `ParameterError` naming `parameter` unless `condition` holds."""
    if not condition:
        raise ParameterError(parameter, message)
