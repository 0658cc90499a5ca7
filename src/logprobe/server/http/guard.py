"""The endpoint of a route: check keys, count, and turn failures into replies."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from logprobe.errors import ProcessorError
from logprobe.server.http.errors import ApiError, ClientGoneError, as_api_error, drop_tracebacks
from logprobe.server.http.gate import CALL, PIECE_BYTES, PROBES
from logprobe.server.http.replies import JSON_TYPE
from logprobe.server.limits import InProgress
from logprobe.server.openai.bodies import BODIES, QUERIES
from logprobe.server.openai.ignored_fields import ignored_warning, reason, warning

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

    from logprobe.server.http.gate import Call
    from logprobe.server.http.keys import Keys, OperatorKeys
    from logprobe.server.metrics import Metrics
    from logprobe.server.models import Models
    from logprobe.server.service import Service

    Handler = Callable[[HttpRequest, Service], Awaitable[Response]]
    Endpoint = Callable[[HttpRequest], Coroutine[Any, Any, Any]]

# Route → our parameter → the field of its body that gave it, where the two differ.
FIELD_NAMES: Final[dict[str, dict[str, str]]] = {
    "/v1/chat/completions": {"prompt": "messages"},
    "/v1/responses": {"prompt": "input", "response_format": "text"},
    "/v1/score": {"prompt": "continuations"},
    "/v1/classify": {"prompt": "input"},
    "/v1/judge": {"prompt": "input"},
    "/v1/uncertainty": {"prompt": "input"},
    "/v1/rerank": {"prompt": "documents"},
    "/v2/rerank": {"prompt": "documents"},
    "/rerank": {"prompt": "documents"},
    "/v1/next_token_logprobs": {"prompt": "prompts"},
    "/update_weights_from_disk": {"version": "weight_version", "weights": "model_path"},
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


def endpoint(path: str, handler: Handler, models: Models, keys: Keys | OperatorKeys | None) -> Endpoint:
    """A route's function behind keys, on the model that a request names, its failures as replies.

    One that asks for none is no work; of every other route, requests in progress are bounded, which they are
    until their reply is sent.
    """
    most = models.settings.max_requests + models.settings.max_waiting
    in_progress = InProgress(most, "requests of this route")

    async def serve(request: HttpRequest) -> HeldReply:
        resources, call = ExitStack(), request.scope[CALL]
        call.route = path
        try:
            key = None if keys is None else keys.check(request.headers.get("authorization"))
            if request.method == "POST" and keys is not None:  # not of `/ping`
                models.lifetime.check_open()
            service, caller = models.first, caller_of(request, key)
            if keys is not None:  # who brings none has no model loaded
                resources.enter_context(in_progress.hold(caller))
                service = await models.enter(request, caller)
                resources.callback(models.leave, service)
            scoped = service.for_one_request(caller, call)
            resources.callback(scoped.release)
            response = await handler(request, scoped)
            num_bytes = len(getattr(response, "body", b""))
            # Of less nothing waits outside its connection; figures are told when the server is full, too.
            if num_bytes > PIECE_BYTES and path not in PROBES:
                scoped.hold(num_bytes)
        except ClientGoneError:
            models.metrics.aborted()
            response = Response(status_code=CLIENT_CLOSED)
        except Exception as error:  # noqa: BLE001 - every failure becomes a reply that says what to do
            response = failure(as_api_error(error, FIELD_NAMES.get(path)), models.metrics, error)
            drop_tracebacks(error)
        name_without_effect(response, call, models)
        models.metrics.replies.labels(path, response.status_code).inc()
        return HeldReply(response, resources.close)

    serve.__name__, serve.__doc__ = handler.__name__, handler.__doc__
    return serve


def name_without_effect(response: Response, call: Call, models: Models) -> None:
    """Name the fields of a request that changed nothing: to its client, and once to the operator."""
    for name in call.without_effect:
        response.headers.append("warning", warning(name))
        if name not in models.told:
            models.told.add(name)
            logger.warning("%s", reason(name))
    if call.ignored_fields:
        response.headers.append("warning", ignored_warning(call.ignored_fields))
        models.metrics.ignored_fields.inc(len(call.ignored_fields))
        if OTHER_FIELD not in models.told:  # once, and without the client's words
            models.told.add(OTHER_FIELD)
            logger.warning("a request has unknown fields, which are ignored: its reply's Warning names them")


def caller_of(request: HttpRequest, key: int | None) -> str:
    """Who asks, as far as callers are told apart: by the number of their key, or else by their address."""
    if key is not None:
        return f"key {key}"
    return request.client.host if request.client else ""


def failure(error: ApiError, metrics: Metrics, cause: Exception | None = None) -> Response:
    """The reply to a failure; what only a bug of ours can cause goes to the log."""
    if error.status == 500 and not isinstance(cause, ProcessorError):  # the engine has told its author's line
        logger.error("a request failed", exc_info=cause)
    if error.status == 400:
        metrics.rejected.labels(field_of(error.param)).inc()
    return Response(error.to_json(), error.status, error.headers, media_type=JSON_TYPE)


def field_of(param: str | None) -> str:
    """The field of a body, or of a query, that a refusal named; the empty text where it named none."""
    field = (param or "").partition(".")[0].partition("[")[0]
    return field if field in FIELDS or not param else OTHER_FIELD
