"""The outermost door: who may call by which name, from which web page; every reply's id, and its pieces.

Before it: the socket. After it: CORS and the routes. A browser sends what a page tells it to, also to servers
on its own machine: it says the page's origin in `Origin`, and in `Host` the name that the page called, which
whoever owns the name can let point to any address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import uuid
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from logprobe.errors import shortened
from logprobe.server.http.errors import ApiError
from logprobe.server.http.replies import JSON_TYPE

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from logprobe.server.settings import ServerSettings

ANY: Final = "*"
PIECE_BYTES: Final = 1 << 16  # of a reply that wait in the process for a client to take them


class Gate:
    """ASGI middleware in front of everything."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._lock = asyncio.Lock()  # of large replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it without looking at more than its header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply_id = f"req_{uuid.uuid4().hex}"

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = reply_id
                await send(message)
            else:
                await send_pieces(message, send, self._lock)

        try:
            check_caller(Headers(scope=scope), scope["scheme"], self._settings)
        except ApiError as error:
            refusal = Response(error.to_json(), error.status, media_type=JSON_TYPE)
            await refusal(scope, receive, send_named)
        else:
            await self._app(scope, receive, send_named)


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
