"""HTTP responses: JSON, streams that stop when the client disconnects, and cached documents with an ETag."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.responses import Response

from logprobe.server.http.errors import ApiError, ClientGoneError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

    from logprobe.server.http.workers import Workers

T = TypeVar("T")

JSON_TYPE: Final = "application/json"
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
PARQUET_TYPE: Final = "application/vnd.apache.parquet"
# Media ranges that include the type of a reply that is not binary
ORDINARY: Final = {JSON_TYPE, "text/event-stream", "application/*", "text/*", "*/*"}
CHECK_EVERY_S = 0.5
EVENT_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"
# Many clients treat these characters as line ends (Python's `splitlines`, httpx's `iter_lines`), although
# they are not line ends in JSON and server-sent events.
LINE_ENDS: Final = {end.encode(): f"\\u{ord(end):04x}".encode() for end in ("\u0085", "\u2028", "\u2029")}


def media_type_of(request: HttpRequest, offered: Sequence[str] = (ARROW_TYPE, PARQUET_TYPE)) -> str:
    """Choose a reply's media type from `offered` and JSON, according to the `Accept` header.

    Raises:
        ApiError: 406 if the header allows only binary types, and pyarrow is not installed.
    """
    accept = request.headers.get("accept", "").lower()
    if not any(name in accept for name in offered):
        return JSON_TYPE
    ranges = [_media_range(item) for item in accept.split(",")]
    ranges.sort(key=lambda one: -one[1])  # stable: the order of the header decides between equal weights
    is_installed = find_spec("pyarrow") is not None
    for name, weight in ranges:
        if weight > 0 and name in offered and is_installed:
            return name
        if weight > 0 and name in ORDINARY:
            return JSON_TYPE
    if is_installed:
        return JSON_TYPE
    raise ApiError(
        406, f"Accept: {accept[:200]} needs the extra `arrow` on the server; accept {JSON_TYPE} instead"
    )


def _media_range(item: str) -> tuple[str, float]:
    """Return the name and weight of one item of an `Accept` header."""
    name, *parameters = (part.strip().lower() for part in item.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return name, float(parameter[2:])
            except ValueError:
                return name, 0.0
    return name, 1.0


def json_reply(value: Any) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(value), media_type=JSON_TYPE)


def event(data: bytes, name: str | None = None) -> bytes:
    """Encode a JSON document as a server-sent event; see `one_line`."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + one_line(data) + b"\n\n"


def one_line(data: bytes) -> bytes:
    """Escape the characters in a JSON document that some clients treat as line ends."""
    for end, escape in LINE_ENDS.items():
        data = data.replace(end, escape)
    return data


class StreamedReply(Response):
    """Streams parts with backpressure, and closes their generator as soon as the client disconnects."""

    def __init__(
        self,
        parts: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        *,
        check: Callable[[], object],
        failed: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        """Prepare the response.

        Args:
            parts: yields the parts of the body.
            headers: headers of the response.
            check: called regularly while parts are awaited; raises ApiError to end the response.
            failed: encodes an ApiError as the last part; if None, the response is aborted.
        """
        super().__init__(headers=headers)
        if "content-length" not in headers:
            del self.headers["content-length"]
        self._parts = parts
        self._check = check
        self._failed = failed
        self._has_sent_parts = False  # True once all parts were sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send all parts, unless the client disconnects."""
        sender = asyncio.create_task(self._send_all(send))
        try:
            await _first_of(sender, receive, self._check)
        except ClientGoneError:
            return
        except ApiError as error:
            if self._failed is None and not self._has_sent_parts:
                raise
            # If all parts were sent, only the end of the body is missing: it is sent without the error.
            last = b"" if self._failed is None or self._has_sent_parts else self._failed(error)
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._parts) as parts:
            async for data in parts:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        self._has_sent_parts = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], check: Callable[[], object]) -> T:
    """Return the result of `work`, which is cancelled as soon as the client disconnects or `check` raises.

    Raises:
        ClientGoneError: the client disconnected.
        ApiError: `check` raised this error.
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


@dataclass(frozen=True, slots=True)
class Document:
    """JSON bytes and their ETag."""

    data: bytes
    etag: str

    @classmethod
    def of(cls, data: bytes) -> Document:
        """Create a document whose ETag is a hash of its bytes."""
        return cls(data, f'"{hashlib.sha256(data).hexdigest()[:32]}"')

    def reply(self, request: HttpRequest) -> Response:
        """Return the document, or a 304 if `If-None-Match` contains the document's ETag."""
        headers = {"ETag": self.etag, "Cache-Control": "no-cache"}
        header = request.headers.get("if-none-match", "")
        known = [tag.strip().removeprefix("W/") for tag in header.split(",")]
        if self.etag in known or known == ["*"]:
            return Response(status_code=304, headers=headers)
        return Response(self.data, media_type=JSON_TYPE, headers=headers)


class Documents:
    """Cache of documents, which workers create on first request; used in one event loop."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._documents: dict[str, Document] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def reply(self, request: HttpRequest, name: str, make: Callable[[], bytes]) -> Response:
        """Return the document `name`, created by `make` on the first request.

        Raises:
            ApiError: 429 if too many jobs are waiting for a worker.
        """
        if name not in self._documents:
            if name not in self._tasks:  # concurrent requests share one task, which outlives each of them
                self._tasks[name] = asyncio.create_task(self._make(name, make))
            await asyncio.shield(self._tasks[name])
        return self._documents[name].reply(request)

    async def _make(self, name: str, make: Callable[[], bytes]) -> None:
        try:
            self._documents[name] = await self._workers.read(lambda: Document.of(make()), None)
        finally:
            del self._tasks[name]
