"""Wrapper around each route's handler: checks keys, counts requests, selects the model, converts errors."""

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

# By route: Python parameter name → name of the body field, where they differ.
FIELD_NAMES: Final[dict[str, dict[str, str]]] = {
    "/v1/chat/completions": {"prompt": "messages"},
    "/v1/responses": {"prompt": "input", "response_format": "text"},
    "/v1/loglikelihood": {"prompt": "continuations"},
    "/v1/label": {"prompt": "input"},
    "/generative_scoring": {"prompt": "items", "logprob_token_ids": "label_token_ids"},
    "/v1/score": {"prompt": "items", "logprob_token_ids": "label_token_ids"},
    "/v1/judge": {"prompt": "input"},
    "/v1/uncertainty": {"prompt": "input"},
    "/v1/rerank": {"prompt": "documents"},
    "/v2/rerank": {"prompt": "documents"},
    "/rerank": {"prompt": "documents"},
    "/v1/next_token_logprobs": {"prompt": "prompts"},
    "/v1/hidden_states": {"prompt": "prompts", "return_hidden_states": "layers"},
    "/update_weights_from_disk": {"version": "weight_version", "weights": "model_path"},
}
# Label values of the metric for rejections. Arbitrary names from clients would make the metrics grow forever.
FIELDS: Final = frozenset(
    {name for body in BODIES.values() for name in body.__struct_fields__}
    | {query["name"] for queries in QUERIES.values() for query in queries}
)
OTHER_FIELD: Final = "other"
CLIENT_CLOSED = 499  # status that is counted if the client disconnected; it is never sent

logger = logging.getLogger("logprobe.server")


class HeldReply:
    """A reply that calls `release` once it has been sent or the client has disconnected."""

    def __init__(self, reply: Response, release: Callable[[], object]) -> None:
        self._reply = reply
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply."""
        try:
            await self._reply(scope, receive, send)
        finally:
            self._release()


def endpoint(path: str, handler: Handler, models: Models, keys: Keys | OperatorKeys | None) -> Endpoint:
    """Wrap a route's handler: check the key, select the model, and convert errors to replies.

    If `keys` is None, the route needs no key, and its concurrent requests are not limited, because they need
    little work. On other routes, the number of concurrent requests is limited; a request counts until its
    reply has been sent.
    """
    most = models.settings.max_requests + models.settings.max_waiting
    in_progress = InProgress(most, "requests of this route")

    async def serve(request: HttpRequest) -> HeldReply:
        resources, call = ExitStack(), request.scope[CALL]
        call.route = path
        try:
            key = None if keys is None else keys.check(request.headers.get("authorization"))
            if request.method == "POST" and keys is not None:  # excludes `POST /ping`
                models.lifetime.check_open()
            service, caller = models.first, caller_of(request, key)
            if keys is not None:  # routes without keys must not load a model
                resources.enter_context(in_progress.hold(caller))
                service = await models.enter(request, caller)
                resources.callback(models.leave, service)
                if request.method != "POST":  # the route of a POST checks its body's name
                    service.check_model(request.query_params.get("model"))
            scoped = service.for_one_request(caller, call)
            resources.callback(scoped.release)
            response = await handler(request, scoped)
            num_bytes = len(getattr(response, "body", b""))
            # Send small replies in one piece. Probes and metrics must work even when the server is full.
            if num_bytes > PIECE_BYTES and path not in PROBES:
                scoped.hold(num_bytes)
        except ClientGoneError:
            models.metrics.aborted()
            response = Response(status_code=CLIENT_CLOSED)
        except Exception as error:  # noqa: BLE001 - every error becomes a reply
            response = failure(as_api_error(error, FIELD_NAMES.get(path)), models.metrics, error)
            drop_tracebacks(error)
        name_without_effect(response, call, models)
        models.metrics.replies.labels(path, response.status_code).inc()
        return HeldReply(response, resources.close)

    serve.__name__, serve.__doc__ = handler.__name__, handler.__doc__
    return serve


def name_without_effect(response: Response, call: Call, models: Models) -> None:
    """Name ignored fields in the reply's `Warning` header and, once per field, in the log."""
    for name in call.without_effect:
        response.headers.append("warning", warning(name))
        if name not in models.told:
            models.told.add(name)
            logger.warning("%s", reason(name))
    if call.ignored_fields:
        response.headers.append("warning", ignored_warning(call.ignored_fields))
        models.metrics.ignored_fields.inc(len(call.ignored_fields))
        if OTHER_FIELD not in models.told:  # once, without the names from the client
            models.told.add(OTHER_FIELD)
            logger.warning("ignored unknown fields of a request; the reply's Warning header names them")


def caller_of(request: HttpRequest, key: int | None) -> str:
    """Return the identity of a caller for limits: the index of its key or, without keys, its IP address."""
    if key is not None:
        return f"key {key}"
    return request.client.host if request.client else ""


def failure(error: ApiError, metrics: Metrics, cause: Exception | None = None) -> Response:
    """Convert an error to a response; internal errors are logged, and rejections are counted."""
    if error.status == 500 and not isinstance(cause, ProcessorError):  # the engine logs processor errors
        logger.error("a request failed", exc_info=cause)
    if error.status == 400:
        metrics.rejected.labels(field_of(error.param)).inc()
    return Response(error.to_json(), error.status, error.headers, media_type=JSON_TYPE)


def field_of(param: str | None) -> str:
    """Return the top-level field in an error's `param`: "" if None, `OTHER_FIELD` for an unknown field."""
    field = (param or "").partition(".")[0].partition("[")[0]
    return field if field in FIELDS or not param else OTHER_FIELD
