"""Exceptions raised by this library, in one tree.

::

    LogprobeError
    ├── ParameterError (ValueError)        an invalid parameter; `.parameter` names it
    │   ├── UnknownParameterError (TypeError)  an unknown name; the message suggests the nearest one
    │   ├── ConflictingParametersError         no token can be sampled; `.parameters` names the causes
    │   └── PromptTooLongError                 more tokens than the model or the cache can hold
    ├── InputError (ValueError)            a file or text that cannot be read as requested
    ├── OutputError (OSError)              a file that cannot be written
    ├── BusyError (RuntimeError)           a buffer is full and its consumer does not read
    ├── MissingPackageError (ImportError)  a required package is not installed
    ├── ModelError                         the model cannot be loaded
    │   ├── ModelNotFoundError (LookupError)   no such name, folder or file
    │   ├── DownloadError (OSError)            the weights could not be downloaded or stored
    │   ├── ChecksumError                      downloaded files differ from the published ones
    │   └── UnsupportedModelError              the model needs a feature that this engine lacks
    └── EngineError (RuntimeError)         the engine could not finish an accepted request
        ├── EngineClosedError                  used after `close()`
        ├── EngineUnavailableError             its process cannot be started at the moment
        ├── ForwardError                       the model's forward pass raised
        ├── NonFiniteLogitsError               a row of logits held NaN, +inf, or only -inf
        ├── ProcessorError                     a logits processor failed a request; `.processor` names it
        ├── RequestAbortedError                the caller aborted the request
        ├── WeightsReplacedError               the model's weights were replaced while the request ran
        ├── ServerError                        a server failed, sent an invalid reply, or timed out
        │   └── UnreachableError (ConnectionError) no connection to the server, or it broke
        └── BatchError                         some requests of a call failed; holds all outputs

Each message is one line that names the cause and the remedy.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from logprobe.ignored_kwargs import names_here

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


class LogprobeError(Exception):
    """Base class of all errors raised by this library.

    Remedy: catch it to handle all of them alike, or catch one of its subclasses.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the attributes, because constructor arguments differ from class to class.
        return remade, (type(self), self.args, self.__dict__)


def remade(kind: type[LogprobeError], args: tuple[Any, ...], fields: Mapping[str, Any]) -> LogprobeError:
    """Rebuild a pickled error."""
    # `OSError` has a larger object layout and needs its own `__new__`, wherever it is in the MRO.
    error: LogprobeError = (OSError if issubclass(kind, OSError) else kind).__new__(kind, *args)
    error.args = args
    vars(error).update(fields)
    return error


class ParameterError(LogprobeError, ValueError):
    """A parameter has an invalid value; `.parameter` is its name.

    Remedy: call again with one of the values that the message names; nothing has run.
    """

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


MAX_NAME_CHARS: Final = 64


def shortened(text: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """Truncate a name or other text from a caller for use in a message."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def in_one_line(error: BaseException, max_chars: int = 300) -> str:
    """Format the class and message of another library's error as one line for a message."""
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()), max_chars)


def closest(name: str, known: Iterable[str], cutoff: float) -> str | None:
    """Return the known name closest to an unknown one; None if none is close, or the name is too long."""
    if len(name) > MAX_NAME_CHARS:
        return None
    near = get_close_matches(name, known, n=1, cutoff=cutoff)
    return near[0] if near else None


def nearest_name(name: str, known: Collection[str], cutoff: float) -> str | None:
    """Return the parameter that an unknown name most likely means, or None."""
    own = next((own for own in names_here(name) if own in known), None)
    return own or closest(name, known, cutoff)


class UnknownParameterError(ParameterError, TypeError):
    """A parameter of that name does not exist; the message suggests the nearest one.

    Remedy: use the name in the message; keywords of other libraries may have other names here
    (docs/coming-from.md).
    """

    def __init__(self, parameter: str, known: Iterable[str], *, of: str) -> None:
        known = sorted(known)
        near = nearest_name(parameter, known, cutoff=0.7)
        remedy = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
        super().__init__(shortened(parameter), f"{of} has no such parameter; {remedy}")


class ConflictingParametersError(ParameterError):
    """Parameters of one request leave no token to sample; `.parameters` and `.processors` name all involved.

    Raised before anything runs if the request alone shows the conflict. Otherwise the request ends with this
    error during generation, and its output keeps the tokens sampled so far.

    Remedy: change or leave out one of the parameters that the message names.
    """

    def __init__(self, parameters: Iterable[str], processors: Iterable[str], fault: str) -> None:
        first, *others = self.parameters = tuple(dict.fromkeys(parameters))
        self.processors = tuple(dict.fromkeys(processors))
        self.fault = fault  # what is wrong, without names: "leaves no token to draw"
        together = f"with {', '.join(others)}, " if others else ""
        remedy = "change one of them" if others else "change it"
        super().__init__(first, f"{together}{fault} ({', '.join(self.processors)}); {remedy}")

    def renamed(self, names: Mapping[str, str]) -> ConflictingParametersError:
        """Return the same error with other parameter names, such as the fields of an HTTP body."""
        parameters = [names.get(name, name) for name in self.parameters]
        return ConflictingParametersError(parameters, self.processors, self.fault)


class PromptTooLongError(ParameterError):
    """A prompt has more tokens than the model's context or the cache can hold.

    Remedy: shorten it; or set `truncation="left"` or `"window"`; or raise `max_model_len` or
    `kv_cache_memory_bytes` if the model's context is longer.
    """


class InputError(LogprobeError, ValueError):
    """A file or a text cannot be read as requested.

    Remedy: the message names the file, the position and what was expected there; fix the file, or specify
    its format.
    """


class OutputError(LogprobeError, OSError):
    """A file cannot be written; existing content is kept.

    Remedy: free disk space, or choose another path; a run over a data set continues with `resume`.
    """


class BusyError(LogprobeError, RuntimeError):
    """A buffer is full and its consumer does not read; nothing was added.

    Remedy: read the pending items, then add again.
    """


class MissingPackageError(LogprobeError, ImportError):
    """A required package is not installed; the message has the command that installs it.

    Remedy: install the extra that the message names.
    """


class ModelError(LogprobeError):
    """A model cannot be loaded.

    Remedy: see the subclasses for causes and remedies.
    """


class ModelNotFoundError(ModelError, LookupError):
    """No model with that name, folder or file exists.

    Remedy: `logprobe models list` prints the names known here; `logprobe models pull NAME` downloads one.
    """


class DownloadError(ModelError, OSError):
    """The weights could not be downloaded or stored.

    Remedy: check the network, the settings of pip or of the Hugging Face Hub, and the free disk space; or use
    a local folder.
    """


class ChecksumError(ModelError):
    """Downloaded files differ from the published ones.

    Remedy: run `pip cache purge` and pull again; if the error persists, use a folder that you trust.
    """


class UnsupportedModelError(ModelError):
    """The model needs a feature that this engine does not support.

    Remedy: the message names the feature; the page Models of the documentation lists supported and
    unsupported models with the reasons.
    """


class EngineError(LogprobeError, RuntimeError):
    """The engine could not finish an accepted request.

    Remedy: see the subclass for the cause; the output that holds the error has the results so far.
    """


class EngineClosedError(EngineError):
    """The engine was used after `close()`, in a forked process, or while the interpreter shuts down.

    Remedy: use it inside the `with` block, or create a new `LLM`.
    """


class EngineUnavailableError(EngineError):
    """The engine's process died and cannot be restarted at the moment.

    Remedy: fix the cause that the message names (no folder for temporary files, changed model files). The
    engine then accepts requests again; your program need not be restarted.
    """


class ForwardError(EngineError):
    """The model's forward pass raised; the original error is the cause.

    Remedy: read `error.__cause__`; if memory ran out, lower `max_num_batched_tokens` or
    `kv_cache_memory_bytes`, then retry.
    """


class NonFiniteLogitsError(EngineError):
    """A row of logits held NaN or +inf, or only -inf.

    Remedy: check the weights and the `dtype`: float16 overflows where float32 and bfloat16 do not.
    """


class ProcessorError(EngineError):
    """A logits processor failed one request; `.processor` is its name, the original error is the cause.

    Remedy: fix the processor; the traceback of `error.__cause__` is in the log. Other requests are not
    affected.
    """

    def __init__(self, processor: str, message: str) -> None:
        super().__init__(f"{processor} {message}")
        self.processor = processor


class RequestAbortedError(EngineError):
    """The request was aborted before it ended.

    Remedy: none if you aborted it; otherwise retry. `reset_async_queries` or closing the event loop aborts
    requests, too.
    """


class WeightsReplacedError(EngineError):
    """The model's weights were replaced while the request ran.

    Remedy: retry with the new weights; or load weights with `on_running="finish"`.
    """


class ServerError(EngineError):
    """A server returned an internal error or an invalid reply, or timed out.

    Remedy: read the message, then the server's log; retry later.
    """


class UnreachableError(ServerError, ConnectionError):
    """The server cannot be reached, or the connection broke before the reply.

    Remedy: check the address, and that `logprobe serve` runs there (`GET /health`).
    """


class BatchError(EngineError):
    """Some requests of one call failed; `.outputs` holds every output, `.errors` the failures by index.

    Remedy: use the complete outputs and retry the others; or call with `on_error="return"`, which returns
    each failure as its output's `.error`.
    """

    def __init__(self, outputs: Sequence[Any], errors: dict[int, LogprobeError]) -> None:
        listed = "; ".join(f"request {index}: {error}" for index, error in list(errors.items())[:5])
        more = f"; and {len(errors) - 5} more" if len(errors) > 5 else ""
        super().__init__(f"{len(errors)} of {len(outputs)} requests failed: {listed}{more}")
        self.outputs = outputs
        self.errors = errors


_UNSAID: Final = object()


def require(condition: object, parameter: str, message: str, *, got: object = _UNSAID) -> None:
    """Raise `ParameterError` for `parameter` unless `condition` is true.

    `got` is appended to the message, shortened; it is only formatted on an error.
    """
    if not condition:
        raise ParameterError(parameter, message if got is _UNSAID else f"{message}, got {got!r:.60}")
