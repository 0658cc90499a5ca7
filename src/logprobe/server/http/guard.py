"""What every request passes: keys, counting, and failures that become replies.

Before it: uvicorn. After it: the routes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from logprobe.server.http.errors import ApiError, ClientGoneError, as_api_error
from logprobe.server.http.gate import PIECE_BYTES
from logprobe.server.http.replies import JSON_TYPE
from logprobe.server.limits import InProgress
from logprobe.server.openai.bodies import BODIES, QUERIES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping
    from typing import Any

    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

    from logprobe.server.service import Service
    from logprobe.server.settings import ServerSettings

    Handler = Callable[[HttpRequest, Service], Awaitable[Response]]
    Endpoint = Callable[[HttpRequest], Coroutine[Any, Any, Any]]

# Route → our parameter → the field of its body that gave it, where the two differ.
FIELD_NAMES: Final[dict[str, dict[str, str]]] = {
    "/v1/chat/completions": {"prompt": "messages"},
    "/v1/responses": {"prompt": "input", "response_format": "text"},
    "/v1/score": {"prompt": "continuations"},
    "/v1/next_token_logprobs": {"prompt": "prompts"},
}
# By which refusals are counted: with names that clients invent, the figures would grow without end.
FIELDS: Final = frozenset(
    {name for body in BODIES.values() for name in body.__struct_fields__}
    | {query["name"] for queries in QUERIES.values() for query in queries}
)
OTHER_FIELD: Final = "other"
CLIENT_CLOSED = 499  # never sent: nobody reads it; only counted

logger = logging.getLogger("logprobe.server")


class HeldReply:
    """A reply whose request counts as in progress until it is sent, or its client is gone."""

    def __init__(self, reply: Response, release: Callable[[], object]) -> None:
        self._reply = reply
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await self._reply(scope, receive, send)
        finally:
            self._release()


def endpoint(path: str, handler: Handler, service: Service, *, is_open: bool = False) -> Endpoint:
    """A route's function behind the keys, its failures as replies.

    `is_open` needs no key, and is no work; of every other route, requests in progress are bounded, which they
    are until their reply is sent.
    """
    bound = nullcontext() if is_open else InProgress(service.settings.max_requests)

    async def serve(request: HttpRequest) -> HeldReply:
        resources = ExitStack()
        try:
            keys = () if is_open else service.settings.api_key
            key = check_key(request.headers.get("authorization"), keys)
            scoped = service.for_one_request(caller_of(request, key))
            resources.callback(scoped.release)
            resources.enter_context(bound)
            response = await handler(request, scoped)
            num_bytes = len(getattr(response, "body", b""))
            if num_bytes > PIECE_BYTES:  # of less nothing waits outside its connection
                scoped.hold(num_bytes)
        except ClientGoneError:
            service.metrics.aborted()
            response = Response(status_code=CLIENT_CLOSED)
        except Exception as error:  # noqa: BLE001 - every failure becomes a reply that says what to do
            response = failure(as_api_error(error, FIELD_NAMES.get(path)), service, error)
        service.metrics.replies.labels(path, response.status_code).inc()
        return HeldReply(response, resources.close)

    serve.__name__, serve.__doc__ = handler.__name__, handler.__doc__
    return serve


def caller_of(request: HttpRequest, key: int | None) -> str:
    """Who asks, as far as callers are told apart: by the number of their key, or else by their address."""
    if key is not None:
        return f"key {key}"
    return request.client.host if request.client else ""


def check_key(header: str | None, keys: tuple[str, ...]) -> int | None:
    """The number of the key that is brought, None without keys; each is compared, in constant time.

    Raises:
        ApiError: 401.
    """
    if not keys:
        return None
    brought = _key_of(header)
    matches = [hmac.compare_digest(brought or b"", key.encode()) for key in keys]
    if brought is None or not any(matches):
        raise ApiError(
            401,
            "bring a valid key as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return matches.index(True)


def owner_of(headers: Mapping[str, str], settings: ServerSettings) -> bytes:
    """Whose a request is: a digest of its key, and the same for all where the server has no keys."""
    key = _key_of(headers.get("authorization")) if settings.api_key else None
    return hashlib.sha256(key or b"").digest()


def _key_of(header: str | None) -> bytes | None:
    scheme, _, key = (header or "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else None  # as it came


def failure(error: ApiError, service: Service, cause: Exception | None = None) -> Response:
    """The reply to a failure; what only a bug of ours can cause goes to the log."""
    if error.status == 500:
        logger.error("a request failed", exc_info=cause)
    if error.status == 400:
        service.metrics.rejected.labels(field_of(error.param)).inc()
    return Response(error.to_json(), error.status, error.headers, media_type=JSON_TYPE)


def field_of(param: str | None) -> str:
    """The field of a body, or of a query, that a refusal named; the empty text where it named none."""
    field = (param or "").partition(".")[0].partition("[")[0]
    return field if field in FIELDS or not param else OTHER_FIELD
