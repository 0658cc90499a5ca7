"""`POST /v1/chat/completions`: messages in, OpenAI's chat shapes out.

Before it: HTTP. After it: a generation and its pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logprobe.server.http.decode import read
from logprobe.server.http.replies import DONE
from logprobe.server.openai.bodies import ChatBody
from logprobe.server.openai.fields import chat_params, named_as_asked
from logprobe.server.openai.prompts import encode_messages, layout_of
from logprobe.server.reply import Generation, answer, usage
from logprobe.server.rows import (
    chat_logprobs,
    choice_extensions,
    ending_extensions,
    prompt_extensions,
    reply_extensions,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from logprobe.engine.request import CompletionPiece
    from logprobe.server.http.errors import ApiError
    from logprobe.server.service import Service


async def chat_completions(request: HttpRequest, service: Service) -> Response:
    """Answer one chat request."""
    body, generation = await read(request, service, ChatBody, prepare)
    shape = ChatShape(service, body, generation)
    return await answer(request, service, generation, shape, is_stream=bool(body.stream))


def prepare(body: ChatBody, service: Service) -> tuple[ChatBody, Generation]:
    """Check and admit what is asked."""
    service.choose_weights(body)
    service.log_body("chat", body)
    ids = encode_messages(body.messages, service, layout_of(body))
    room = service.capabilities.max_model_len + 1 - len(ids)
    with named_as_asked(body):
        params = chat_params(body, service.settings, room=room)
        return body, Generation(service, service.new_id("chatcmpl"), [(ids, params)])


class ChatShape:
    """OpenAI's `chat.completion` and its chunks."""

    terminator = DONE
    closing_repeats_all = False

    def __init__(self, service: Service, body: ChatBody, generation: Generation) -> None:
        self._service = service
        self._body = body
        self._generation = generation
        options = body.stream_options
        self._has_usage = bool(options and options.include_usage)
        self._has_sent_prompt = False

    def whole(self, pieces: Sequence[CompletionPiece]) -> dict[str, Any]:
        """The reply, one choice a completion."""
        output = self._generation.outputs[0]
        reply = self._frame("chat.completion", [self._choice(piece) for piece in pieces])
        reply["usage"] = usage(self._generation)
        extensions = prompt_extensions(self._service, self._body, output)
        return reply | extensions | reply_extensions(self._body, self._generation.params, output)

    def opening(self) -> Iterator[dict[str, Any]]:
        """The role of each choice."""
        for index in range(self._generation.params.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, piece: CompletionPiece) -> Iterator[dict[str, Any]]:
        """Text with its rows, then the reason where it has ended."""
        extras = choice_extensions(self._body, piece)
        if piece.text or piece.text_tokens or (extras and piece.num_rows):
            delta = {"content": piece.text}
            logprobs = chat_logprobs(self._service, self._generation, piece)
            yield self._chunk(piece.index, delta, logprobs, **extras) | self._prompt()
        if piece.finish_reason:
            ending = ending_extensions(self._service, self._body, piece)
            chunk = self._chunk(piece.index, {}, finish_reason=piece.finish_reason, **ending)
            yield chunk | self._prompt()

    def closing(self) -> Iterator[dict[str, Any]]:
        """Usage, where it was asked for."""
        if self._has_usage:
            chunk = self._frame("chat.completion.chunk", [])
            yield chunk | {"usage": usage(self._generation)}

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The error as any reply would carry it."""
        return error.to_dict()

    def _choice(self, piece: CompletionPiece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": chat_logprobs(self._service, self._generation, piece),
            "finish_reason": piece.finish_reason,
            **choice_extensions(self._body, piece),
            **ending_extensions(self._service, self._body, piece),
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **extras: Any,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._frame("chat.completion.chunk", [choice | extras])

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        reply = {
            "id": self._generation.reply_id,
            "object": kind,
            "created": self._service.now(),
            "model": self._service.name_of(self._body),
            "choices": choices,
        }
        return reply | {"usage": None} if self._has_usage else reply

    def _prompt(self) -> dict[str, Any]:
        """The prompt's fields, with the first chunk that has them."""
        if self._has_sent_prompt:
            return {}
        self._has_sent_prompt = True
        output = self._generation.outputs[0]
        extensions = prompt_extensions(self._service, self._body, output)
        return extensions | reply_extensions(self._body, self._generation.params, output)
