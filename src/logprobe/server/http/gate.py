"""Outermost ASGI middleware: checks `Host` and `Origin`, assigns request ids, and writes the access log.

A web page can make a browser send requests to servers on the browser's machine. The browser puts the page's
origin in `Origin` and the requested name in `Host`. Both are checked, because the owner of a name can make it
resolve to any address (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from logprobe import runtime
from logprobe.engine.forward.process_memory import return_freed
from logprobe.errors import shortened
from logprobe.server.http.errors import ApiError
from logprobe.server.http.replies import JSON_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from logprobe.engine.request import RequestOutput
    from logprobe.server.settings import ServerSettings

ANY: Final = "*"
PIECE_BYTES: Final = 1 << 16  # maximum size of the part of a reply that is buffered until the client reads it

MANY_OPEN: Final = 64
"""After this many concurrent requests, freed memory is returned to the system; glibc would keep it."""

REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")  # accepted from clients: printable ASCII without spaces
PROBES: Final = frozenset({"/health", "/ready", "/ping", "/metrics"})  # logged at debug level
CALL: Final = "logprobe.call"  # key of the `Call` in a request's ASGI scope

access_logger = logging.getLogger("logprobe.access")
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the HTTP request that the current task belongs to."""


@dataclass(slots=True)
class Call:
    """Facts about one HTTP request for the access log and metrics; times are in seconds since its header."""

    request_id: str
    client: str = ""
    method: str = ""
    route: str | None = None  # path in the route table; None if there is no such route
    status: int | None = None  # None if the client disconnected before the reply
    model: str | None = None  # name of the model or LoRA adapter that answered
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_rows: int | None = None  # prompt positions with log-probabilities; None if not requested
    without_effect: list[str] = field(default_factory=list)  # known fields that had no effect
    ignored_fields: list[str] = field(default_factory=list)  # paths of ignored unknown fields in the body
    has_large_body: bool = False
    first_token_s: float | None = None  # set for streams only
    seconds: float = 0.0
    _start_s: float = field(default_factory=lambda: runtime.perf_counter())  # noqa: PLW0108 - replaceable

    def note_token(self) -> None:
        """Record the time of the first token."""
        if self.first_token_s is None:
            self.first_token_s = runtime.perf_counter() - self._start_s

    @property
    def token_s(self) -> float | None:
        """Mean seconds per token after a stream's first token; None without a stream or a second token."""
        if self.first_token_s is None or self.completion_tokens < 2:
            return None
        return (self.seconds - self.first_token_s) / (self.completion_tokens - 1)

    def note_output(self, output: RequestOutput) -> None:
        """Add the numbers of tokens and log-probability rows of a finished engine request."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if output.prompt_logprobs is not None:
            self.prompt_rows = (self.prompt_rows or 0) + len(output.prompt_logprobs)

    def end(self) -> None:
        """Stop the clock and write the access log line."""
        self.seconds = runtime.perf_counter() - self._start_s
        level = logging.DEBUG if self.route in PROBES else logging.INFO
        if access_logger.isEnabledFor(level):
            facts = {name: getattr(self, name) for name in FACTS}
            access_logger.log(level, "%s", self._text(), extra={"facts": facts})

    def _text(self) -> str:
        first = "" if self.first_token_s is None else f", first token after {self.first_token_s:.3f} s"
        tokens = f", {self.prompt_tokens} + {self.completion_tokens} tokens" if self.prompt_tokens else ""
        by = f" by {self.model}" if self.model else ""
        status = "client disconnected" if self.status is None else str(self.status)
        asked = f"{self.client or '-'} {self.method} {self.route or 'no route'}"
        return f"{asked}: {status}{by} in {self.seconds:.3f} s{first}{tokens}"


# Fields of a `Call` that a JSON log line leaves out, and fields that it contains.
UNTOLD: Final = frozenset({"request_id", "without_effect", "ignored_fields", "has_large_body", "_start_s"})
FACTS: Final = tuple(one.name for one in fields(Call) if one.name not in UNTOLD)


def begin_call(given: str | None, **facts: Any) -> Call:
    """Create a request's `Call`, and set the request id for the log lines of this task and its subtasks.

    `given` is the client's `X-Request-Id`, which becomes the request id if it matches `REQUEST_ID`.
    """
    name = given if given is not None and REQUEST_ID.fullmatch(given) else f"req_{runtime.uuid4().hex}"
    request_id.set(name)
    return Call(name, **facts)


class Gate:
    """Outermost ASGI middleware of the server."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, ended: Callable[[Call], object]) -> None:
        """Create the middleware; `ended` is called with the `Call` of each finished request."""
        self._app = app
        self._settings = settings
        self._ended = ended
        self._lock = asyncio.Lock()  # held to send one piece of a large reply
        self._num_open = self._most_open = 0  # open requests now, and their maximum since memory was returned
        self._returning: asyncio.Task[None] | None = None
        self._must_return = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or reject it because of its header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client = (scope.get("client") or [""])[0]
        call = begin_call(headers.get("x-request-id"), client=client, method=scope["method"])
        scope[CALL] = call

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = call.request_id
                await send(message)
            else:
                await send_pieces(message, send, self._lock)

        self._num_open += 1
        self._most_open = max(self._most_open, self._num_open)
        try:
            await self._let_in(headers, scope, receive, send_named)
        finally:
            self._num_open -= 1
            call.end()
            self._ended(call)
            had_many = not self._num_open and self._most_open >= MANY_OPEN
            if had_many:
                self._most_open = 0
            if had_many or call.has_large_body:
                self._return_freed()

    def _return_freed(self) -> None:
        """Return freed memory to the system in a thread; a call during a run causes one more run."""
        self._must_return = True
        if self._returning is None or self._returning.done():
            self._returning = asyncio.create_task(self._returned())

    async def _returned(self) -> None:
        while self._must_return:
            self._must_return = False
            await asyncio.to_thread(return_freed)

    async def _let_in(self, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_caller(headers, scope["scheme"], self._settings)
        except ApiError as error:
            refusal = Response(error.to_json(), error.status, media_type=JSON_TYPE)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def send_pieces(message: Message, send: Send, lock: asyncio.Lock) -> None:
    """Send a body in pieces, each after the client has read the previous one; return after the last piece."""
    body = message.get("body", b"")
    for begin in range(0, len(body), PIECE_BYTES):
        piece = body[begin : begin + PIECE_BYTES]
        if len(body) > PIECE_BYTES:
            async with lock:  # one piece of all large replies per iteration of the event loop
                await asyncio.sleep(0)
        await send({"type": message["type"], "body": piece, "more_body": True})
    if not message.get("more_body", False):
        await send({"type": message["type"], "body": b"", "more_body": False})


def check_caller(headers: Headers, scheme: str, settings: ServerSettings) -> None:
    """Check `Host` and `Origin`, to protect against DNS rebinding and cross-origin requests.

    Raises:
        ApiError: 403 if the host is neither the server's own nor allowed, or the origin is not allowed.
    """
    host = headers.get("host", "")
    if not is_own_name(host, settings):
        raise ApiError(
            403,
            f"host {shortened(host)!r} is not an allowed host; start the server with --allowed-host",
            code="host_not_allowed",
        )
    origin = headers.get("origin")
    # If the server listens on loopback only, programs may send `Host: 0.0.0.0`, but a page from there is not
    # of the same origin.
    has_page = listens_on_all(settings) or not is_unspecified(_name_in(host))
    own = {f"{scheme}://{host}".lower()} if has_page else set()
    allowed = own | {*settings.allowed_origins}
    if origin is not None and origin.lower() not in allowed and ANY not in allowed:
        pages = f"pages of {shortened(origin)!r}"
        raise ApiError(
            403,
            f"{pages} may not call this server; start it with --allowed-origins to allow them",
            code="origin_not_allowed",
        )


def is_own_name(host: str, settings: ServerSettings) -> bool:
    """Return True if a `Host` header has a loopback address, the bound address, or an allowed name.

    If the server listens on all addresses, any IP address is accepted, because DNS rebinding needs a host
    name. A local server also accepts the unspecified address (0.0.0.0), which programs use for loopback.
    """
    name = _name_in(host)
    if name in {"localhost", settings.host.lower(), *map(str.lower, settings.allowed_host)}:
        return bool(name)
    address = _address(name)
    if address is None:
        return ANY in settings.allowed_host and bool(name)
    bound = _address(settings.host)
    is_local = settings.host.lower() == "localhost" or (bound is not None and bound.is_loopback)
    return (
        address.is_loopback
        or address == bound
        or (address.is_unspecified and is_local)
        or listens_on_all(settings)
        or ANY in settings.allowed_host
    )


def listens_on_all(settings: ServerSettings) -> bool:
    """Return True if the server listens on all addresses of the machine."""
    return not settings.host or is_unspecified(settings.host)


def is_unspecified(name: str) -> bool:
    """Return True for the unspecified addresses 0.0.0.0 and [::]."""
    address = _address(name)
    return address is not None and address.is_unspecified


def _name_in(host: str) -> str:
    """Return the name or address in a `Host` header without the port, or "" if the header is invalid."""
    if set(host) & set("@/?#\\"):
        return ""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
