"""The outermost door: who may call by which name, from which web page; a reply's id, pieces and log line.

A browser sends what a page tells it to, also to servers on its own machine: it says the page's origin in
`Origin`, and in `Host` the name that the page called, which whoever owns the name can let point to any
address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

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
PIECE_BYTES: Final = 1 << 16  # of a reply that wait in the process for a client to take them

MANY_OPEN: Final = 64
"""Requests at once whose replies, once freed, are given back to the system, which glibc would else keep."""

REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")  # that is taken from a client: printable, and one word
PROBES: Final = frozenset({"/health", "/ready", "/ping", "/metrics"})  # are asked all the time: debug
CALL: Final = "logprobe.call"  # where the scope of a request holds its `Call`

access_logger = logging.getLogger("logprobe.access")
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the HTTP request that a task works for, where it does."""


@dataclass(slots=True)
class Call:
    """What one HTTP request came to; seconds are counted from its header."""

    request_id: str
    client: str = ""
    method: str = ""
    route: str | None = None  # as the table of routes has it; None: none of them
    status: int | None = None  # None: the client left before there was one
    model: str | None = None  # or LoRA weights, that answered
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_rows: int | None = None  # of log-probabilities; None: none were asked
    without_effect: list[str] = field(default_factory=list)  # fields that were taken and changed nothing
    ignored_fields: list[str] = field(default_factory=list)  # unknown fields, by their paths in the body
    has_large_body: bool = False
    first_token_s: float | None = None  # of a stream
    seconds: float = 0.0
    _start_s: float = field(default_factory=time.perf_counter)

    def note_token(self) -> None:
        """Note when the first token came."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self._start_s

    @property
    def token_s(self) -> float | None:
        """Seconds a token after the first of a stream; None where there is none."""
        if self.first_token_s is None or self.completion_tokens < 2:
            return None
        return (self.seconds - self.first_token_s) / (self.completion_tokens - 1)

    def note_output(self, output: RequestOutput) -> None:
        """Count what an engine request took and gave."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if output.prompt_logprobs is not None:
            self.prompt_rows = (self.prompt_rows or 0) + len(output.prompt_logprobs)

    def end(self) -> None:
        """Write the line."""
        self.seconds = time.perf_counter() - self._start_s
        level = logging.DEBUG if self.route in PROBES else logging.INFO
        if access_logger.isEnabledFor(level):
            facts = {name: getattr(self, name) for name in FACTS}
            access_logger.log(level, "%s", self._text(), extra={"facts": facts})

    def _text(self) -> str:
        first = "" if self.first_token_s is None else f", first token after {self.first_token_s:.3f} s"
        tokens = f", {self.prompt_tokens} + {self.completion_tokens} tokens" if self.prompt_tokens else ""
        by = f" by {self.model}" if self.model else ""
        status = "client left" if self.status is None else str(self.status)
        asked = f"{self.client or '-'} {self.method} {self.route or 'no route'}"
        return f"{asked}: {status}{by} in {self.seconds:.3f} s{first}{tokens}"


# Of a call's line.
UNTOLD: Final = frozenset({"request_id", "without_effect", "ignored_fields", "has_large_body", "_start_s"})
FACTS: Final = tuple(one.name for one in fields(Call) if one.name not in UNTOLD)


def begin_call(given: str | None, **facts: Any) -> Call:
    """A request's `Call`, by whose id all lines of this task and of those that it begins are named.

    A client's own id is taken where it is one word of at most 128 printable characters.
    """
    name = given if given is not None and REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
    request_id.set(name)
    return Call(name, **facts)


class Gate:
    """ASGI middleware in front of everything."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, ended: Callable[[Call], object]) -> None:
        """`ended` is told what each request came to."""
        self._app = app
        self._settings = settings
        self._ended = ended
        self._lock = asyncio.Lock()  # of large replies
        self._num_open = self._most_open = 0  # requests now, and at most since memory was given back
        self._returning: asyncio.Task[None] | None = None
        self._must_return = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it without looking at more than its header."""
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
        """Return freed memory to the system in a thread; while it does, one more time is kept for later."""
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
    """Send a body, each piece once the one before it was taken; it ends when the last one was."""
    body = message.get("body", b"")
    for begin in range(0, len(body), PIECE_BYTES):
        piece = body[begin : begin + PIECE_BYTES]
        if len(body) > PIECE_BYTES:
            async with lock:  # one piece of all such replies, then whatever else the event loop has to do
                await asyncio.sleep(0)
        await send({"type": message["type"], "body": piece, "more_body": True})
    if not message.get("more_body", False):
        await send({"type": message["type"], "body": b"", "more_body": False})


def check_caller(headers: Headers, scheme: str, settings: ServerSettings) -> None:
    """Let in who calls the server by a name of its own, and no page of another origin that is not allowed.

    Raises:
        ApiError: 403.
    """
    host = headers.get("host", "")
    if not is_own_name(host, settings):
        raise ApiError(
            403,
            f"host {shortened(host)!r} is no name of this server; start it with --allowed-host to add one",
            code="host_not_allowed",
        )
    origin = headers.get("origin")
    # Programs may call their machine 0.0.0.0; a page from there is not of a server that listens on loopback.
    has_page = listens_on_all(settings) or not is_unspecified(_name_in(host))
    own = {f"{scheme}://{host}".lower()} if has_page else set()
    allowed = own | {*settings.cors_origin}
    if origin is not None and origin.lower() not in allowed and ANY not in allowed:
        pages = f"pages of {shortened(origin)!r}"
        raise ApiError(
            403,
            f"{pages} may not call this server; start it with --cors-origin to let them",
            code="origin_not_allowed",
        )


def is_own_name(host: str, settings: ServerSettings) -> bool:
    """Whether a `Host` is loopback, the bound address, or allowed by name.

    Any address in numbers is the server's own where it listens on all: a page's name is never in numbers. Nor
    is it the unspecified address, which programs take for loopback.
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
    """Whether it listens on all addresses of the machine."""
    return not settings.host or is_unspecified(settings.host)


def is_unspecified(name: str) -> bool:
    """Whether it is 0.0.0.0 or [::], which stand for no address."""
    address = _address(name)
    return address is not None and address.is_unspecified


def _name_in(host: str) -> str:
    """The name or address of a `Host`, without its port; empty where it has none."""
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
