"""`POST /v1/responses`: text in, one message out; `GET` and `DELETE` of those that are stored.

Before it: HTTP. After it: a generation and its pieces. Final items carry rows with bytes, events without.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from logprobe.server.http.decode import read
from logprobe.server.http.guard import owner_of
from logprobe.server.http.replies import JSON_TYPE, json_reply
from logprobe.server.openai.bodies import ResponsesBody
from logprobe.server.openai.fields import responses_params
from logprobe.server.openai.items import list_items, read_conversation
from logprobe.server.reply import Generation, answer, num_top

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from starlette.requests import Request as HttpRequest

    from logprobe.engine.request import CompletionPiece
    from logprobe.records.forms.json import ChatEncoder
    from logprobe.server.http.errors import ApiError
    from logprobe.server.service import Service
    from logprobe.server.stored import Messages, Stored


async def create_response(request: HttpRequest, service: Service) -> Response:
    """Answer one request."""
    owner = owner_of(request.headers, service.settings)
    asked = await read(request, service, ResponsesBody, partial(understand, owner=owner))
    shape = ResponseShape(service, asked)
    return await answer(request, service, asked.generation, shape, is_stream=bool(asked.body.stream))


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was understood: the conversation so far, and what is asked of it, admitted."""

    owner: bytes
    body: ResponsesBody
    said: Messages
    generation: Generation


def understand(body: ResponsesBody, service: Service, owner: bytes) -> Asked:
    """What one owner asks."""
    service.choose_weights(body)
    service.log_body("responses", body)
    said, ids = read_conversation(body, service, owner)
    room = service.capabilities.max_model_len + 1 - len(ids)
    params = responses_params(body, room=room, max_logprobs=service.settings.max_logprobs)
    return Asked(owner, body, said, Generation(service, service.new_id("resp"), [(ids, params)]))


async def get_response(request: HttpRequest, service: Service) -> Response:
    """Give a stored response again."""
    return Response(_found(request, service).response, media_type=JSON_TYPE)


async def list_input_items(request: HttpRequest, service: Service) -> Response:
    """List the messages that a stored response answered, the latest first."""
    stored, query = _found(request, service), dict(request.query_params)

    def written() -> bytes:
        before = stored.messages()[:-1]  # the last is the answer itself
        return msgspec.json.encode(list_items(request.path_params["response_id"], before, query))

    return Response(await service.workers.run(written), media_type=JSON_TYPE)


async def delete_response(request: HttpRequest, service: Service) -> Response:
    """Forget a stored response."""
    response_id = request.path_params["response_id"]
    service.stored.drop(owner_of(request.headers, service.settings), response_id)
    told = {"id": response_id, "object": "response.deleted", "deleted": True}
    return json_reply(told)


def _found(request: HttpRequest, service: Service) -> Stored:
    return service.stored.find(
        owner_of(request.headers, service.settings), request.path_params["response_id"]
    )


class ResponseShape:
    """OpenAI's `response` object and the events that build it."""

    last_words = b""  # the last event says that it is the last
    closes_whole = True

    def __init__(self, service: Service, asked: Asked) -> None:
        self._service = service
        self._asked = asked
        self._body = asked.body
        self._generation = asked.generation
        self._item_id = asked.generation.reply_id.replace("resp", "msg", 1)
        self._created_at = service.now()
        self._pieces: list[CompletionPiece] = []
        self._num_events = 0

    def whole(self, pieces: Sequence[CompletionPiece]) -> dict[str, Any]:
        """The response, stored unless the client asked not to."""
        (piece,) = pieces
        status = "completed" if piece.finish_reason == "stop" else "incomplete"
        part = self._part(piece.text, self._rows(piece, self._service.encoder))
        response = self._response(status, [self._item(status, [part])]) | {"usage": self._usage()}
        if self._body.store is not False:
            messages = [*self._asked.said, {"role": "assistant", "content": piece.text}]
            self._service.stored.keep(self._asked.owner, response, messages)
        return response

    def opening(self) -> Iterator[dict[str, Any]]:
        """What is known before any text."""
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._part_event("response.content_part.added", part=self._part("", msgspec.Raw(b"[]")))

    def chunks(self, piece: CompletionPiece) -> Iterator[dict[str, Any]]:
        """Text with its rows."""
        self._pieces.append(piece)
        if piece.text or piece.text_tokens:
            rows = self._rows(piece, self._service.event_encoder)
            yield self._part_event("response.output_text.delta", delta=piece.text, logprobs=rows)

    def closing(self) -> Iterator[dict[str, Any]]:
        """Everything once more, whole."""
        piece = self._joined()
        response = self.whole([piece])
        (item,) = response["output"]
        (part,) = item["content"]
        rows = self._rows(piece, self._service.event_encoder)
        yield self._part_event("response.output_text.done", text=piece.text, logprobs=rows)
        yield self._part_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The error event of this interface."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _joined(self) -> CompletionPiece:
        last = self._pieces[-1]
        return replace(
            last,
            start=0,
            text="".join(piece.text for piece in self._pieces),
            text_tokens=[token for piece in self._pieces for token in piece.text_tokens],
        )

    def _rows(self, piece: CompletionPiece, encoder: ChatEncoder) -> msgspec.Raw:
        record = piece.completion.logprobs
        if record is None:
            return msgspec.Raw(b"[]")
        return encoder.rows(record, piece.text_tokens, num_top(self._generation))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    @staticmethod
    def _part(text: str, rows: msgspec.Raw) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": rows}

    def _item(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": parts,
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, is_cut = self._body, status == "incomplete"
        return {
            "id": self._generation.reply_id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._service.name_of(self._body),
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": self._generation.params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._generation.params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        given, made = self._generation.num_prompt_tokens, self._generation.num_completion_tokens
        return {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + made,
        }
