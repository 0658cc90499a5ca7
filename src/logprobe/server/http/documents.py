"""Replies that are the same for all clients: each made once, and kept as bytes under an ETag.

Before it: a route that can say what it tells. After it: the reply, or 304 to a client that has it already.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response

from logprobe.server.openai.replies import JSON_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request as HttpRequest

    from logprobe.server.http.workers import Workers


@dataclass(frozen=True, slots=True)
class Document:
    """JSON, and what names these bytes."""

    data: bytes
    etag: str

    @classmethod
    def of(cls, data: bytes) -> Document:
        """These bytes, named by what they say."""
        return cls(data, f'"{hashlib.sha256(data).hexdigest()[:32]}"')

    def reply(self, request: HttpRequest) -> Response:
        """The document, or 304 where `If-None-Match` names it."""
        headers = {"ETag": self.etag, "Cache-Control": "no-cache"}
        given = request.headers.get("if-none-match", "")
        known = [tag.strip().removeprefix("W/") for tag in given.split(",")]
        if self.etag in known or known == ["*"]:
            return Response(status_code=304, headers=headers)
        return Response(self.data, media_type=JSON_TYPE, headers=headers)


class Documents:
    """Makes each document when it is first asked for, in a worker; used from one event loop."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._made: dict[str, Document] = {}
        self._making: dict[str, asyncio.Task[Document]] = {}

    async def reply(self, request: HttpRequest, name: str, make: Callable[[], bytes]) -> Response:
        """What `make` gave when it was called for this name.

        Raises:
            ApiError: 429, too many jobs wait for a worker.
        """
        if name not in self._made:
            self._made[name] = await self._being_made(name, make)
        return self._made[name].reply(request)

    async def _being_made(self, name: str, make: Callable[[], bytes]) -> Document:
        """The one making of a document for all who ask meanwhile, whoever of them leaves."""
        if name not in self._making:
            task = asyncio.create_task(self._workers.run(lambda: Document.of(make())))
            task.add_done_callback(lambda _: self._making.pop(name))
            self._making[name] = task
        return await asyncio.shield(self._making[name])
