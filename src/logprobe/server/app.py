"""The route table, the ASGI application, and the server that runs the application."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import ssl
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Match

from logprobe.engine.backends.start import start_engine
from logprobe.engine.forward.process_memory import keep_out_of_collections
from logprobe.errors import ParameterError, shortened
from logprobe.server import logs
from logprobe.server.http.errors import ApiError
from logprobe.server.http.gate import Gate
from logprobe.server.http.guard import endpoint, failure
from logprobe.server.http.keys import Keys
from logprobe.server.http.protocol import BadConnections, TimedProtocol
from logprobe.server.http.shutdown import LAST_S, DrainingServer
from logprobe.server.models import Models
from logprobe.server.routes import docs, facts, labels, operator
from logprobe.server.routes.chat import chat_completions
from logprobe.server.routes.completions import completions
from logprobe.server.routes.generative_scoring import generative_scoring, score
from logprobe.server.routes.hidden_states import hidden_states
from logprobe.server.routes.loglikelihood import loglikelihood
from logprobe.server.routes.next_token import next_token_logprobs
from logprobe.server.routes.responses import (
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from logprobe.server.routes.uncertainty import uncertainty
from logprobe.server.settings import read_confidences, read_response_template

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from logprobe.config import EngineConfig
    from logprobe.engine.backends.start import LoadedModel
    from logprobe.server.http.guard import Handler
    from logprobe.server.settings import FurtherModel, ServerSettings

VERSION: Final = "/v1"
OPEN: Final = {"/", "/docs", "/health", "/ready", "/ping", "/version"}  # routes that need no API key
METRICS_HOST: Final = "127.0.0.1"
OPERATORS: Final = {
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/update_weights_from_disk",
    "/reset_prefix_cache",
}

ROUTES: Final[tuple[tuple[str, str, Handler], ...]] = (
    ("GET", "/", facts.page),
    ("GET", "/health", facts.health),
    ("GET", "/ready", facts.ready),
    ("GET", "/ping", facts.health),  # vLLM and SageMaker use either method
    ("POST", "/ping", facts.health),
    ("GET", "/version", facts.version),
    ("GET", "/docs", docs.docs),
    ("GET", "/openapi.json", docs.openapi),
    ("GET", "/metrics", facts.metrics),
    ("GET", "/v1/models", facts.models),
    ("GET", "/v1/models/{model:path}", facts.model),
    ("GET", "/v1/capabilities", facts.capabilities),
    ("GET", "/server_info", facts.server_info),
    ("GET", "/get_world_size", facts.get_world_size),
    ("GET", "/v1/logits_processors", facts.logits_processors),
    ("GET", "/v1/tokenizer", facts.tokenizer),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", create_response),
    ("GET", "/v1/responses/{response_id}", get_response),
    ("DELETE", "/v1/responses/{response_id}", delete_response),
    ("GET", "/v1/responses/{response_id}/input_items", list_input_items),
    ("POST", "/v1/loglikelihood", loglikelihood),
    ("POST", "/v1/label", labels.label),
    ("POST", "/generative_scoring", generative_scoring),
    ("POST", "/v1/score", score),
    ("POST", "/v1/judge", labels.judge),
    ("POST", "/v1/uncertainty", uncertainty),
    ("POST", "/v1/rerank", labels.rerank),
    ("POST", "/v2/rerank", labels.rerank),
    ("POST", "/rerank", labels.rerank),
    ("POST", "/v1/next_token_logprobs", next_token_logprobs),
    ("POST", "/v1/hidden_states", hidden_states),
    ("POST", "/tokenize", facts.tokenize),
    ("POST", "/detokenize", facts.detokenize),
    ("GET", "/tokenizer_info", facts.tokenizer_info),
    ("POST", "/v1/tokenize", facts.tokenize),
    ("POST", "/v1/detokenize", facts.detokenize),
    ("GET", "/v1/tokenizer_info", facts.tokenizer_info),
    ("POST", "/v1/load_lora_adapter", operator.load_lora_adapter),
    ("POST", "/v1/unload_lora_adapter", operator.unload_lora_adapter),
    ("POST", "/update_weights_from_disk", operator.update_weights_from_disk),
    ("POST", "/reset_prefix_cache", operator.reset_prefix_cache),
)


def create_app(
    model: LoadedModel,
    settings: ServerSettings,
    processors: Sequence[str | type] = (),
    further: Mapping[str, FurtherModel] | None = None,
) -> Starlette:
    """Create the ASGI application for a loaded model and further models by name.

    Args:
        model: the first model; the caller closes its engine.
        settings: settings of the server.
        processors: logits processors that the first model's engine was started with.
        further: additional models by name, which are loaded on demand.
    """
    models = Models(model, settings, processors, further)
    app = Starlette()
    app.state.models, app.state.service, app.state.routes = models, models.first, ROUTES
    for method, path, handler in ROUTES:
        keys = models.operator_keys if path in OPERATORS else models.keys
        serve = endpoint(path, handler, models, None if path in OPEN else keys)
        app.router.add_route(path, serve, methods=[method])

    async def not_routed(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = shortened(request.url.path)
        message = f"{request.method} {path} is not a route; {remedy_for(request)}"
        refusal = ApiError(error.status_code, message, headers=error.headers, code="no_such_route")
        return failure(refusal, models.metrics)

    app.add_exception_handler(HTTPException, not_routed)
    if settings.metrics_port is not None:
        figures = Starlette(exception_handlers={HTTPException: not_routed})
        serve = endpoint("/metrics", facts.metrics, models, None)
        figures.router.add_route("/metrics", serve, methods=["GET"])
        app.add_middleware(OwnPort, figures=figures, address=(METRICS_HOST, settings.metrics_port))
    if settings.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        origins = list(settings.allowed_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    # The middleware added last runs first.
    app.add_middleware(Gate, settings=settings, ended=models.metrics.timed)
    return app


# Routes of other servers, by path without /v1, and what to use instead of them.
ELSEWHERE: Final = {
    "/embeddings": "this server has no embedding models; POST /v1/rerank ranks documents by relevance",
    "/messages": "Anthropic's API is not served; use POST /v1/chat/completions",
    "/classify": "use POST /v1/label for the probabilities of labels",
    "/pooling": "this server has no pooling models; POST /v1/label and /v1/rerank score texts",
    "/audio/transcriptions": "only text models are served",
    "/images/generations": "only text models are served",
}


def remedy_for(request: HttpRequest) -> str:
    """Return the remedy for an unknown path; often, the client's base URL lacks /v1."""
    if remedy := ELSEWHERE.get(request.scope["path"].removeprefix(VERSION)):
        return remedy
    scope = dict(request.scope, path=VERSION + request.scope["path"])
    if any(route.matches(scope)[0] is Match.FULL for route in request.app.router.routes):
        return f"use {shortened(VERSION + request.url.path)} (does the client's base_url lack {VERSION}?)"
    return "GET /docs lists all routes"


class OwnPort:
    """ASGI middleware that serves the metrics, and nothing else, on the metrics port."""

    def __init__(self, app: ASGIApp, figures: ASGIApp, address: tuple[str, int]) -> None:
        self._app, self._figures, self._address = app, figures, address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the metrics or to the application, by the server address at which it arrived."""
        app = self._figures if scope["server"] == self._address else self._app
        await app(scope, receive, send)


BACKLOG = 2048

logger = logging.getLogger("logprobe.server")


def serve(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    further: Mapping[str, FurtherModel] | None = None,
    ready: Callable[[str], object] | None = None,
) -> None:
    """Serve models until SIGTERM or SIGINT; requests in progress then have `drain_s` seconds to finish.

    Args:
        config: engine configuration of the first model.
        settings: settings of the server.
        further: additional models by name, which are loaded on demand.
        ready: called with the server's URL once the server listens and the first and preloaded models are
            loaded.

    Raises:
        ModelError: a model or LoRA weights cannot be loaded.
        ParameterError: the settings do not fit the model, two LoRA adapters have the same name, or the
            server cannot listen on the address.
    """
    Keys(settings)  # validate keys, certificate and templates before loading a model
    check_certificate(settings)
    for one in (settings, *(model.settings for model in (further or {}).values())):
        read_response_template(one.response_template)
        read_confidences(one)
    with ExitStack() as stack:
        listeners = [stack.enter_context(_listen(settings.host, settings.port, "port"))]
        host, port = listeners[0].getsockname()[:2]
        if settings.metrics_port is not None:
            beside = stack.enter_context(_listen(METRICS_HOST, settings.metrics_port, "metrics_port"))
            listeners.append(beside)
            settings = replace(settings, metrics_port=beside.getsockname()[1])
        logs.configure(settings)
        model = start_engine(config)
        try:
            app = create_app(model, settings, config.logits_processors, further)
            stack.callback(app.state.models.close)
            app.state.models.prepare()
            keep_out_of_collections()
            scheme = "http" if settings.ssl_certfile is None else "https"
            if ready is not None:
                ready(f"{scheme}://{host}:{port}")
            if settings.metrics_port is not None:
                logger.info("metrics: %s://%s:%d/metrics", scheme, METRICS_HOST, settings.metrics_port)
            run_server(app, settings, listeners)
        finally:
            if model.engine.stalled_s() <= settings.stall_s:  # close() would block on a stuck engine
                model.engine.close()


def _listen(host: str, port: int, setting: str) -> socket.socket:
    """Create a listening socket; an error about the port names the setting `setting`."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        # Negative error numbers are name resolution failures (getaddrinfo).
        is_host = error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT} or (error.errno or 0) < 0
        name, remedy = (
            ("host", "an address of this machine")
            if is_host
            else (setting, "another port, or 0 for a free one")
        )
        reason = str(error.strerror or error).partition(" (while")[0]
        message = f"cannot listen on {host}:{port} ({reason}); choose {remedy}"
        raise ParameterError(name, message) from error


def check_certificate(settings: ServerSettings) -> None:
    """Validate the TLS certificate and its private key, if a certificate is set.

    Raises:
        ParameterError: a file is missing or is not a certificate, or the key does not belong to it.
    """
    if settings.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        files = " and ".join(filter(None, (settings.ssl_certfile, settings.ssl_keyfile)))
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        what = f"cannot load {files} ({reason}); set a certificate and its private key without a password"
        raise ParameterError("ssl_certfile", what) from error


def run_server(app: Starlette, settings: ServerSettings, listeners: list[socket.socket]) -> None:
    """Run uvicorn on listening sockets until a signal arrives and requests have drained.

    Raises:
        KeyboardInterrupt: a second signal arrived.
    """
    models: Models = app.state.models
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, lambda *_: _reload_keys(models.keys))
    server = DrainingServer(uvicorn_config(app, settings), models.lifetime)
    server.run(listeners)
    if server.force_exit:
        raise KeyboardInterrupt


def _reload_keys(keys: Keys) -> None:
    try:
        logger.info("SIGHUP: reloaded the API keys; %d are valid", keys.reload())
    except ParameterError as error:
        logger.error("SIGHUP: the API keys were not reloaded: %s", error)  # noqa: TRY400 - it says all


def uvicorn_config(app: Starlette, settings: ServerSettings) -> uvicorn.Config:
    """Return the configuration of uvicorn for this server."""
    bad_connections = BadConnections(app.state.models.metrics.bad_connections)
    return uvicorn.Config(
        app,
        http=partial(TimedProtocol, settings, bad_connections),  # type: ignore[arg-type]  # a class factory
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ws="none",  # a connection upgraded to WebSocket would bypass this protocol's limits
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=LAST_S,
        lifespan="off",
    )
