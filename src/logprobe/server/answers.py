"""Run the generation of a request, and reply in the media type that the `Accept` header asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.server.http.replies import JSON_TYPE, media_type_of
from logprobe.server.reply import answer_json

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from logprobe.server.reply import Generation, Shape
    from logprobe.server.service import Service


async def answer(
    request: HttpRequest, service: Service, generation: Generation, shape: Shape, *, is_stream: bool
) -> Response:
    """Run a generation and return the reply; the generation is aborted if the client disconnects.

    Raises:
        LogprobeError: the generation failed, and the reply is not streamed.
        ApiError: the `Accept` header asks for a binary type that the server does not offer, or that cannot be
            combined with another field of the request.
        ClientGoneError: the client disconnected before the reply.
    """
    media_type = media_type_of(request)
    if media_type == JSON_TYPE:
        return await answer_json(request, service, generation, shape, is_stream=is_stream)
    from logprobe.server.binary import answer_binary  # only such requests need it

    return await answer_binary(request, service, generation, shape, media_type, is_stream=is_stream)
