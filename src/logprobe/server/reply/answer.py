"""From a generation to an HTTP reply, whole or streamed, in the shape that a route gives it.

Before it: a route's checked request. After it: the socket.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from starlette.responses import Response

from logprobe.server.http.errors import as_api_error
from logprobe.server.http.sse import EVENT_HEADERS, Streamed, event, while_connected
from logprobe.server.openai.replies import JSON_TYPE, encode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from starlette.requests import Request as HttpRequest

    from logprobe.engine.request import CompletionPiece
    from logprobe.server.http.errors import ApiError
    from logprobe.server.reply.generation import Generation
    from logprobe.server.service import Service

QUICK_TOKENS: Final = 256  # of a prompt and a reply that is written in a few milliseconds

logger = logging.getLogger("logprobe.server")


class Shape(Protocol):
    """One route's form of a reply."""

    def whole(self, pieces: Sequence[CompletionPiece]) -> dict[str, Any]:
        """The reply, from one piece a choice."""

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks before any text."""

    def chunks(self, piece: CompletionPiece) -> Iterator[dict[str, Any]]:
        """Chunks of one increment."""

    def closing(self) -> Iterator[dict[str, Any]]:
        """Chunks after all text."""

    closes_whole: bool
    """Whether those say everything once more."""

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The chunk in which a stream says that it failed."""

    @property
    def last_words(self) -> bytes:
        """What ends a stream that went well."""


async def answer(
    request: HttpRequest, service: Service, generation: Generation, shape: Shape, *, is_stream: bool
) -> Response:
    """Run a generation for a client that may leave at any time.

    Raises:
        LogprobeError: it failed before anything was sent.
        ClientGoneError: nobody is left to answer.
    """
    if is_stream:
        return Streamed(
            _events(service, generation, shape),
            EVENT_HEADERS,
            check=service.check_engine,
            failed=lambda error: _joined(service, iter([shape.failed(as_api_error(error))])),
        )
    await while_connected(request.receive, generation.run(), service.check_engine)
    write = partial(_whole, service, generation, shape)
    return Response(await _written(service, generation.num_tokens, write), media_type=JSON_TYPE)


async def _written(service: Service, num_tokens: int, write: Callable[[], bytes]) -> bytes:
    """What is written of so many tokens, in a worker where that takes longer than others may wait."""
    return write() if num_tokens <= QUICK_TOKENS else await service.workers.write(write)


def _whole(service: Service, generation: Generation, shape: Shape) -> bytes:
    return encode(service, shape.whole(generation.whole()))


async def _events(service: Service, generation: Generation, shape: Shape) -> AsyncGenerator[bytes]:
    try:
        yield _joined(service, shape.opening())
        async with aclosing(generation.stream()) as batches:
            async for pieces in batches:
                if data := await _written(
                    service, generation.num_tokens_of(pieces), partial(_pieces, service, shape, pieces)
                ):
                    yield data
        num_tokens = generation.num_tokens if shape.closes_whole else 0
        closing = await _written(service, num_tokens, lambda: _joined(service, shape.closing()))
        yield closing + shape.last_words
    except Exception as error:
        told = as_api_error(error)
        if told.code == "internal_error":
            logger.exception("a stream failed")
        yield _joined(service, iter([shape.failed(told)]))


def _pieces(service: Service, shape: Shape, pieces: Sequence[CompletionPiece]) -> bytes:
    return b"".join(_joined(service, shape.chunks(piece)) for piece in pieces)


def _joined(service: Service, chunks: Iterator[dict[str, Any]]) -> bytes:
    """Chunks as events; one that has a type is named by it."""
    return b"".join(event(encode(service, chunk), chunk.get("type")) for chunk in chunks)
