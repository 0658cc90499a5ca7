"""The routes, in one table, as an ASGI application.

Before it: uvicorn. After it: one handler a route.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from logprobe import __version__
from logprobe.server import facts
from logprobe.server.chat import chat_completions
from logprobe.server.completions import completions
from logprobe.server.errors import ApiError
from logprobe.server.guard import endpoint, failure
from logprobe.server.next_token import next_token_logprobs
from logprobe.server.openapi import document
from logprobe.server.responses import create_response, delete_response, get_response
from logprobe.server.score import score
from logprobe.server.service import Service

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from logprobe.engine.backends.start import LoadedModel
    from logprobe.server.guard import Handler
    from logprobe.server.settings import ServerSettings

OPEN: Final = {"/health"}  # need no key

ROUTES: Final[tuple[tuple[str, str, Handler], ...]] = (
    ("GET", "/health", facts.health),
    ("GET", "/metrics", facts.metrics),
    ("GET", "/v1/models", facts.models),
    ("GET", "/v1/models/{model:path}", facts.model),
    ("GET", "/v1/capabilities", facts.capabilities),
    ("GET", "/v1/logits_processors", facts.logits_processors),
    ("GET", "/v1/tokenizer", facts.tokenizer),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", create_response),
    ("GET", "/v1/responses/{response_id}", get_response),
    ("DELETE", "/v1/responses/{response_id}", delete_response),
    ("POST", "/v1/score", score),
    ("POST", "/v1/next_token_logprobs", next_token_logprobs),
    ("POST", "/tokenize", facts.tokenize),
    ("POST", "/detokenize", facts.detokenize),
    ("GET", "/tokenizer_info", facts.tokenizer_info),
    ("POST", "/v1/tokenize", facts.tokenize),
    ("POST", "/v1/detokenize", facts.detokenize),
    ("GET", "/v1/tokenizer_info", facts.tokenizer_info),
)


def create_app(
    model: LoadedModel, settings: ServerSettings, processors: Sequence[str | type] = ()
) -> FastAPI:
    """Put a loaded model behind HTTP; the caller closes its engine.

    `processors` are the logits processors that the engine was started with.
    """
    service = Service(model, settings, processors)
    app = FastAPI(title="logprobe", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    for method, path, handler in ROUTES:
        serve = endpoint(path, handler, service, is_open=path in OPEN)
        app.router.add_route(path, serve, methods=[method])

    async def described(_: HttpRequest, __: Service) -> Response:
        """Give this interface as an OpenAPI document."""
        return facts.json_reply(document(ROUTES))

    app.router.add_route("/openapi.json", endpoint("/openapi.json", described, service), methods=["GET"])

    async def not_routed(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path} is no route; GET /openapi.json lists them all"
        told = ApiError(error.status_code, message, headers=error.headers, code="no_such_route")
        return failure(told, service)

    app.add_exception_handler(HTTPException, not_routed)
    if settings.cors_origin:
        from starlette.middleware.cors import CORSMiddleware

        origins = list(settings.cors_origin)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app
