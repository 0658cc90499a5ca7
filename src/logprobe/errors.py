"""Every error this library raises on purpose, in one tree.

::

    LogprobeError
    ├── ParameterError (ValueError)        a value the caller passed; `.parameter` names it
    │   ├── UnknownParameterError (TypeError)  a name that does not exist; says the nearest one
    │   ├── ConflictingParametersError         leave no token to draw; `.parameters` names them
    │   └── PromptTooLongError                 more tokens than the model or the cache can ever hold
    ├── InputError (ValueError)            a file or text that cannot be read as asked
    ├── OutputError (OSError)              a file that cannot be written
    ├── BusyError (RuntimeError)           a buffer is full, and its consumer takes nothing
    ├── ModelError                         a model that cannot be had or used
    │   ├── ModelNotFoundError (LookupError)   no such name, folder or file
    │   ├── DownloadError (OSError)            the weights could not be fetched or stored
    │   ├── ChecksumError                      what was fetched is not what was published
    │   ├── MissingPackageError (ImportError)  a package that this needs is not installed
    │   └── UnsupportedModelError              the model needs what this engine does not do
    └── EngineError (RuntimeError)         the engine could not finish what it accepted
        ├── EngineClosedError                  asked after `close()`
        ├── EngineUnavailableError             its process cannot be started at the moment
        ├── ForwardError                       the model's forward pass raised
        ├── NonFiniteLogitsError               a row of logits held NaN, +inf, or only -inf
        ├── ProcessorError                     a logits processor failed a request; `.processor` names it
        ├── RequestAbortedError                the caller gave the request up
        ├── WeightsReplacedError               the model got other weights while the request ran
        ├── ServerError                        a server answered with a failure of its own, or too late
        │   └── UnreachableError (ConnectionError) no connection to it, or one that broke
        └── BatchError                         some requests of one call failed; holds all outputs

Each message names the thing at fault and the remedy, in one line.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from logprobe.ignored_kwargs import names_here

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


class LogprobeError(Exception):
    """Root of all errors that this library raises on purpose.

    Remedy: catch it where one answer fits all of them; below it stands what may be told apart.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # By what it holds, not by the arguments it was made from: those differ from class to class.
        return remade, (type(self), self.args, self.__dict__)


def remade(kind: type[LogprobeError], args: tuple[Any, ...], fields: Mapping[str, Any]) -> LogprobeError:
    """An error that has crossed from another process."""
    # An `OSError` has more to it than other errors, and is made by its own kind wherever that stands.
    error: LogprobeError = (OSError if issubclass(kind, OSError) else kind).__new__(kind, *args)
    error.args = args
    vars(error).update(fields)
    return error


class ParameterError(LogprobeError, ValueError):
    """A parameter has a value that cannot be used; `.parameter` is its name.

    Remedy: the message says which values can be; nothing has run, so call again with one of them.
    """

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


MAX_NAME_CHARS: Final = 64


def shortened(text: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """A name, or another text that a caller or a client gave, as a message repeats it."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def in_one_line(error: BaseException, max_chars: int = 300) -> str:
    """The class and message of another library's error, as a message repeats them."""
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()), max_chars)


def closest(name: str, known: Iterable[str], cutoff: float) -> str | None:
    """The known name most like one that does not exist; None where none is, or the name is no name."""
    if len(name) > MAX_NAME_CHARS:
        return None
    near = get_close_matches(name, known, n=1, cutoff=cutoff)
    return near[0] if near else None


def nearest_name(name: str, known: Collection[str], cutoff: float) -> str | None:
    """Return the parameter that was meant by a name that does not exist, if it can be told."""
    own = next((own for own in names_here(name) if own in known), None)
    return own or closest(name, known, cutoff)


class UnknownParameterError(ParameterError, TypeError):
    """A parameter of that name does not exist; the message names the nearest that does.

    Remedy: take the name from the message; a keyword of another library's may be called otherwise here
    (docs/coming-from.md).
    """

    def __init__(self, parameter: str, known: Iterable[str], *, of: str) -> None:
        known = sorted(known)
        near = nearest_name(parameter, known, cutoff=0.7)
        remedy = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
        super().__init__(shortened(parameter), f"{of} has no such parameter; {remedy}")


class ConflictingParametersError(ParameterError):
    """Parameters of one request leave no token to draw; `.parameters` and `.processors` name all involved.

    Raised before anything runs where that can be told from the request alone. Otherwise the request ends with
    it while it generates, and its output keeps the tokens drawn until then.

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
        """Return the same error with the parameters called by other names, such as fields of an HTTP body."""
        parameters = [names.get(name, name) for name in self.parameters]
        return ConflictingParametersError(parameters, self.processors, self.fault)


class PromptTooLongError(ParameterError):
    """A prompt needs more tokens than the model's context or the cache can ever hold.

    Remedy: shorten it; or give `truncation="left"` or `"window"`; or raise `max_model_len` or `kv_bytes`
    where the model's context is longer.
    """


class InputError(LogprobeError, ValueError):
    """A file or a text cannot be read as asked.

    Remedy: the message names the file, the place and what was expected there; mend the file, or say its
    format.
    """


class OutputError(LogprobeError, OSError):
    """A file cannot be written; what is there already is kept.

    Remedy: make room, or name another path; a run over a data set goes on with `resume`.
    """


class BusyError(LogprobeError, RuntimeError):
    """A buffer is full, and its consumer takes nothing; what was to be added was not.

    Remedy: read what waits, then add again.
    """


class ModelError(LogprobeError):
    """A model cannot be had or used.

    Remedy: each class below it says what is wrong, and what to do.
    """


class ModelNotFoundError(ModelError, LookupError):
    """No model of that name, folder or file.

    Remedy: `logprobe models list` prints the names known here; `logprobe models pull NAME` fetches one.
    """


class DownloadError(ModelError, OSError):
    """The weights could not be fetched or stored.

    Remedy: check the network, the settings of pip or of the hub, and the free disk space; or name a local
    folder.
    """


class ChecksumError(ModelError):
    """What was fetched is not what was published.

    Remedy: run `pip cache purge` and pull again; if it comes back, use a folder whose origin you know.
    """


class MissingPackageError(ModelError, ImportError):
    """A package that this needs is not installed; the message is the line that installs it.

    Remedy: install the extra that the message names.
    """


class UnsupportedModelError(ModelError):
    """The model needs something that this engine does not do.

    Remedy: docs/models.md lists what runs and what is refused, and why; the message names the part at
    fault.
    """


class EngineError(LogprobeError, RuntimeError):
    """The engine could not finish something that it had accepted.

    Remedy: one of those below it says why; what came until then is in the output that holds the error.
    """


class EngineClosedError(EngineError):
    """The engine was asked something after `close()`.

    Remedy: ask inside the `with` block, or make a new `LLM`.
    """


class EngineUnavailableError(EngineError):
    """The engine's process died and cannot be started again at the moment.

    Remedy: the message says why (no folder for temporary files, model files that changed); once that is
    mended, the engine takes requests again by itself.
    """


class ForwardError(EngineError):
    """The model's forward pass raised; its own error is the cause.

    Remedy: read `error.__cause__`; where memory ran out, lower `max_batch_tokens` or `kv_bytes`, then ask
    again.
    """


class NonFiniteLogitsError(EngineError):
    """A row of logits held NaN or +inf, or nothing but -inf.

    Remedy: look at the weights and the `dtype`: float16 overflows where float32 and bfloat16 do not.
    """


class ProcessorError(EngineError):
    """A logits processor failed one request; `.processor` is its name, its own error the cause.

    Remedy: mend the processor by `error.__cause__`, whose traceback is in the log; other requests went
    on.
    """

    def __init__(self, processor: str, message: str) -> None:
        super().__init__(f"{processor} {message}")
        self.processor = processor


class RequestAbortedError(EngineError):
    """The caller gave the request up before it ended.

    Remedy: none is needed, unless you gave up nothing: a reset or a closed loop ends what waits, so ask
    again.
    """


class WeightsReplacedError(EngineError):
    """The model got other weights while the request ran.

    Remedy: ask again, on the new weights; or load them with `on_running="finish"`.
    """


class ServerError(EngineError):
    """A server answered with a failure of its own, with what cannot be read, or not in time.

    Remedy: read the message, then the server's log; ask again later.
    """


class UnreachableError(ServerError, ConnectionError):
    """No connection to a server, or one that broke before the reply.

    Remedy: check the address, and that `logprobe serve` runs there (`GET /health`).
    """


class BatchError(EngineError):
    """Some requests of one call failed; `.outputs` holds every output, `.errors` the failures by index.

    Remedy: use the outputs that are whole and ask the others again; or call with `on_error="return"`,
    which gives each failure as its output's `.error`.
    """

    def __init__(self, outputs: Sequence[Any], errors: dict[int, LogprobeError]) -> None:
        listed = "; ".join(f"request {index}: {error}" for index, error in list(errors.items())[:5])
        more = f"; and {len(errors) - 5} more" if len(errors) > 5 else ""
        super().__init__(f"{len(errors)} of {len(outputs)} requests failed: {listed}{more}")
        self.outputs = outputs
        self.errors = errors


_UNSAID: Final = object()


def require(condition: object, parameter: str, message: str, *, got: object = _UNSAID) -> None:
    """Raise `ParameterError` naming `parameter` unless `condition` holds.

    `got`, which callers size, ends the message, shortened; it is put into words for an error alone.
    """
    if not condition:
        raise ParameterError(parameter, message if got is _UNSAID else f"{message}, got {got!r:.60}")
