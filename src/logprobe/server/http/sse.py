"""Replies that watch their client: event streams, and whole replies given up when nobody waits.

Before it: a route's events. After it: the socket.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from starlette.responses import Response

from logprobe.server.http.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from typing import Any

    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

CHECK_EVERY_S = 0.5
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

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        check: Callable[[], object],
        failed: Callable[[Exception], bytes],
        at_end: Callable[[], object],
    ) -> None:
        """Stream `events`, or `failed` of what `check` raises while they are awaited.

        `at_end` runs whatever happens, also where no event was ever asked for.
        """
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._check = check
        self._failed = failed
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send all events, or as many as the client waits for."""
        sender = asyncio.create_task(self._send_all(send))
        try:
            await _first_of(sender, receive, self._check)
        except ClientGoneError:
            return
        except ApiError as error:
            await send({"type": "http.response.body", "body": self._failed(error), "more_body": False})
        finally:
            self._at_end()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], check: Callable[[], object]) -> T:
    """The result of `work`, which is cancelled as soon as the client hangs up or `check` raises.

    Raises:
        ClientGoneError: it hung up.
        ApiError: what `check` raised.
    """
    return await _first_of(asyncio.create_task(work), receive, check)


async def _first_of(work: asyncio.Task[T], receive: Receive, check: Callable[[], object]) -> T:
    watch = asyncio.create_task(_hung_up(receive))
    try:
        while not work.done() and not watch.done():
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED, timeout=CHECK_EVERY_S)
            if not work.done() and not watch.done():
                check()
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
