"""Replies that watch their client: event streams, and whole replies given up when nobody waits.

Before it: a route's events. After it: the socket.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from typing import Any

    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(data: bytes, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


class ClientGoneError(Exception):
    """The client hung up; there is nobody to answer."""


class EventStream(Response):
    """Sends events as they come, at the client's speed; a client that leaves ends their source at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], at_end: Callable[[], object]) -> None:
        """Stream `events`; `at_end` runs whatever happens, also where none was ever asked for."""
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send all events, or as many as the client waits for."""
        sender = asyncio.create_task(self._send_all(send))
        try:
            await _first_of(sender, receive)
        except ClientGoneError:
            return
        finally:
            self._at_end()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client hangs up.

    Raises:
        ClientGoneError: it hung up.
    """
    return await _first_of(asyncio.create_task(work), receive)


async def _first_of(work: asyncio.Task[T], receive: Receive) -> T:
    watch = asyncio.create_task(_hung_up(receive))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGoneError
        return work.result()
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.wait({work, watch})


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
