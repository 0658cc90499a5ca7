"""Convert errors to HTTP replies: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.errors import (
    ConflictingParametersError,
    EngineClosedError,
    EngineUnavailableError,
    LogprobeError,
    ParameterError,
    ProcessorError,
    PromptTooLongError,
    WeightsReplacedError,
    shortened,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_MESSAGE_CHARS: Final = 1500
MAX_PARAM_CHARS: Final = 128  # limit on a path in the body, which may end with a name from the client
RETRY_AFTER_S: Final = 1


class ClientGoneError(Exception):
    """The client disconnected before the reply."""


class ApiError(Exception):
    """A reply with a status other than 2xx; `param` names the invalid body field.

    The message is escaped and shortened to one printable line, because it quotes client input and is shown in
    logs and terminals.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = shortened(message, MAX_MESSAGE_CHARS)
        message = "".join(part if part.isprintable() else repr(part)[1:-1] for part in message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def at(self, field: str) -> ApiError:
        """Return a 400 about another field, with this error's message and code."""
        message = self.message.removeprefix(f"{self.param}: ")
        return bad_request(field, message, code=self.code)

    @property
    def kind(self) -> str:
        """OpenAI's error type for this status."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def to_dict(self) -> dict[str, Any]:
        """Return the reply's body, which always has `message`, `type`, `param` and `code`."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def to_json(self) -> bytes:
        """Return the reply's body as JSON."""
        return msgspec.json.encode(self.to_dict())


def bad_request(param: str | None, message: str, *, code: str | None = "invalid_value") -> ApiError:
    """Return a 400 that names the field `param`."""
    param = param and shortened(param, MAX_PARAM_CHARS)
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def server_full(what: str) -> ApiError:
    """Return a 429 with `Retry-After`; `what` describes the exhausted capacity."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(429, f"the server is full ({what}); try again", code="server_full", headers=headers)


def engine_unavailable(why: str) -> ApiError:
    """Return a 503 with `Retry-After` that says why no engine process accepts requests."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    message = f"the engine does not accept requests now: {why}"
    return ApiError(503, message, code="engine_unavailable", headers=headers)


def as_api_error(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """Convert an exception to an `ApiError`; `names` maps Python parameter names to the route's fields."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ProcessorError) and isinstance(error.__cause__, ParameterError):
        error = error.__cause__  # an invalid processor argument that was detected only at run time
    if isinstance(error, ConflictingParametersError):
        error = error.renamed(names or {})
    if isinstance(error, ParameterError):
        field = (names or {}).get(error.parameter, error.parameter)
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else "invalid_value"
        return bad_request(field, str(error).removeprefix(f"{error.parameter}: "), code=code)
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="engine_closed")
    if isinstance(error, EngineUnavailableError):
        return engine_unavailable(str(error))
    if isinstance(error, WeightsReplacedError):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(503, str(error), code="weights_replaced", headers=headers)
    if isinstance(error, LogprobeError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(500, f"internal server error: {type(error).__name__}", code="internal_error")


def drop_tracebacks(error: BaseException | None) -> None:
    """Drop the tracebacks of a logged error, and those of its cause and context.

    The frames in a traceback often refer back to the error, for example through a future. Such a reference
    cycle would keep the request's body in memory until the next full garbage collection.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        if (one := pending.pop()) is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        pending += (one.__cause__, one.__context__)
        pending += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
