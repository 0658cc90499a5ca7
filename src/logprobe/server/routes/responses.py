"""`POST /v1/responses`: text in, one message out; `GET` and `DELETE` of those that are stored."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from logprobe.errors import ParameterError, shortened
from logprobe.server.http.decode import read
from logprobe.server.http.errors import ApiError, as_api_error, bad_request
from logprobe.server.http.replies import JSON_TYPE, json_reply
from logprobe.server.openai.bodies import MAX_LISTED, ORDERS, ResponsesBody
from logprobe.server.openai.fields import responses_params
from logprobe.server.openai.prompts import encode_messages
from logprobe.server.reply import Generation, answer
from logprobe.server.rows import chat_rows, num_top, reply_extensions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from starlette.requests import Request as HttpRequest

    from logprobe.engine.request import CompletionPiece
    from logprobe.records.values import IntArray
    from logprobe.server.service import Service
    from logprobe.server.stored import Messages, StoredResponse


LABELS: Final = ("type", "id", "status")
"""Fields of an item that tell of it, and say nothing to the model."""

ROWS: Final = ("logprobs", "processed_logprobs")
"""Fields of a text's part that hold its rows, named as the records of a completion."""
NO_ROWS: Final = msgspec.Raw(b"[]")

_MESSAGE: Final = re.compile(r"messages(?:\[(\d+)\])?(.*)", re.DOTALL)


async def create_response(request: HttpRequest, service: Service) -> Response:
    """Answer one request."""
    owner = service.keys.owner_of(request.headers)
    prepared = await read(request, service, ResponsesBody, partial(prepare, owner=owner))
    shape = ResponseShape(service, prepared)
    return await answer(request, service, prepared.generation, shape, is_stream=bool(prepared.body.stream))


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A checked and admitted request, with the conversation so far."""

    owner: bytes
    body: ResponsesBody
    messages: Messages  # the conversation so far
    generation: Generation


def prepare(body: ResponsesBody, service: Service, owner: bytes) -> ResponsesRequest:
    """Check and admit what an owner asks."""
    service.choose_weights(body)
    service.log_body("responses", body)
    messages, ids = read_conversation(body, service, owner)
    room = service.capabilities.max_model_len + 1 - len(ids)
    params = responses_params(body, service.settings, room=room)
    generation = Generation(service, service.new_id("resp"), [(ids, params)])
    return ResponsesRequest(owner, body, messages, generation)


def read_conversation(body: ResponsesBody, service: Service, owner: bytes) -> tuple[Messages, IntArray]:
    """The conversation so far, with what was stored before, and its ids ready for the answer.

    Raises:
        ApiError: what cannot be laid out, by the field of this body that said it.
    """
    before: Messages = []
    if body.previous_response_id is not None:
        before = service.stored.find(owner, body.previous_response_id, "previous_response_id").messages()
    system: Messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = before + _as_messages(body.input)
    try:
        return messages, encode_messages(system + messages, service)
    except (ParameterError, ApiError) as error:
        raise _by_item(as_api_error(error), body, len(system), len(before)) from error


def _as_messages(items: str | list[dict[str, Any]]) -> Messages:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not items:
        raise bad_request("input", "is empty; give a text or messages")
    for index, item in enumerate(items):
        if item.get("type", "message") != "message":
            raise bad_request(f"input[{index}].type", "only messages are read", code="unsupported_parameter")
    return [{name: value for name, value in item.items() if name not in LABELS} for item in items]


def _by_item(error: ApiError, body: ResponsesBody, num_system: int, num_before: int) -> ApiError:
    """An error of a message as one of the field that it came from."""
    is_message = _MESSAGE.fullmatch(error.param or "")
    if is_message is None:
        return error
    number, rest = is_message.groups()
    index = None if number is None else int(number) - num_system - num_before
    field = "input"
    if index is not None and index < -num_before:
        field = "instructions"
    elif index is not None and index < 0:
        field = "previous_response_id"
    elif index is not None and not isinstance(body.input, str):
        field = f"input[{index}]{rest}"
    return bad_request(field, error.message.removeprefix(f"{error.param}: "), code=error.code)


async def get_response(request: HttpRequest, service: Service) -> Response:
    """Give a stored response again."""
    return Response(_find_stored(request, service).response, media_type=JSON_TYPE)


async def list_input_items(request: HttpRequest, service: Service) -> Response:
    """List the messages that a stored response answered, the latest first."""
    stored, query = _find_stored(request, service), dict(request.query_params)

    def written() -> bytes:
        before = stored.messages()[:-1]  # the last is the answer itself
        return msgspec.json.encode(list_items(request.path_params["response_id"], before, query))

    return Response(await service.workers.read(written, len(stored.conversation)), media_type=JSON_TYPE)


def list_items(response_id: str, messages: Messages, query: Mapping[str, str]) -> dict[str, Any]:
    """A page of the messages that a response answered, as OpenAI lists them.

    Raises:
        ApiError: a parameter that is unknown or out of range.
    """
    if unknown := query.keys() - {"limit", "order", "after"}:
        raise bad_request(min(unknown), "is no parameter of this route", code="unknown_parameter")
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ORDERS:
        raise bad_request("order", f"must be one of {', '.join(ORDERS)}, got {shortened(order)!r}")
    if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_LISTED:
        raise bad_request("limit", f"must be an integer in [1, {MAX_LISTED}], got {shortened(limit)!r}")
    own_id = response_id.replace("resp", "msg", 1)
    items = [_as_item(f"{own_id}-{number}", message) for number, message in enumerate(messages)]
    items = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        matches = [number for number, item in enumerate(items) if item["id"] == after]
        if not matches:
            raise bad_request("after", f"there is no item {shortened(after)!r}")
        items = items[matches[0] + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(items),
    }


def _as_item(item_id: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as an item; more than one part of text is given back as such."""
    is_own = message["role"] == "assistant"
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    extras: dict[str, Any] = {"annotations": [], "logprobs": []} if is_own else {}
    kind = "output_text" if is_own else "input_text"
    parts = [{"type": kind, "text": text} | extras for text in texts]
    others = {name: value for name, value in message.items() if name not in {"role", "content"}}
    own = {"id": item_id, "type": "message", "role": message["role"], "status": "completed"}
    return others | own | {"content": parts}


async def delete_response(request: HttpRequest, service: Service) -> Response:
    """Forget a stored response."""
    response_id = request.path_params["response_id"]
    service.stored.drop(service.keys.owner_of(request.headers), response_id)
    return json_reply({"id": response_id, "object": "response.deleted", "deleted": True})


def _find_stored(request: HttpRequest, service: Service) -> StoredResponse:
    return service.stored.find(service.keys.owner_of(request.headers), request.path_params["response_id"])


class ResponseShape:
    """OpenAI's `response` object and the events that build it."""

    terminator = b""  # the last event says that it is the last
    closing_repeats_all = True

    def __init__(self, service: Service, request: ResponsesRequest) -> None:
        self._service = service
        self._request = request
        self._body = request.body
        self._generation = request.generation
        self._item_id = request.generation.reply_id.replace("resp", "msg", 1)
        self._created_at = service.now()
        self._pieces: list[CompletionPiece] = []
        self._num_events = 0

    def whole(self, pieces: Sequence[CompletionPiece]) -> dict[str, Any]:
        """The response, stored unless the client asked not to."""
        (piece,) = pieces
        status = "completed" if piece.finish_reason == "stop" else "incomplete"
        part = self._part(piece.text, self._rows(piece))
        response = self._response(status, [self._item(status, [part])]) | {"usage": self._usage()}
        output = self._generation.outputs[0]
        response |= reply_extensions(self._body, self._generation.params, output)
        if self._body.store is not False:
            messages = [*self._request.messages, {"role": "assistant", "content": piece.text}]
            self._service.stored.keep(self._request.owner, response, messages)
        return response

    def opening(self) -> Iterator[dict[str, Any]]:
        """What is known before any text."""
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._part_event("response.content_part.added", part=self._part("", {"logprobs": NO_ROWS}))

    def chunks(self, piece: CompletionPiece) -> Iterator[dict[str, Any]]:
        """Text with its rows."""
        self._pieces.append(piece)
        if piece.text or piece.text_tokens:
            yield self._part_event("response.output_text.delta", delta=piece.text, **self._rows(piece))

    def closing(self) -> Iterator[dict[str, Any]]:
        """Everything once more, whole."""
        piece = self._joined()
        response = self.whole([piece])
        (item,) = response["output"]
        (part,) = item["content"]
        rows = {name: part[name] for name in ROWS if name in part}
        yield self._part_event("response.output_text.done", text=piece.text, **rows)
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

    def _rows(self, piece: CompletionPiece) -> dict[str, msgspec.Raw]:
        """The rows of a piece, of each distribution that was asked for."""
        records = {name: getattr(piece.completion, name) for name in ROWS}
        return {"logprobs": NO_ROWS} | {
            name: chat_rows(self._service, record, piece.text_tokens, num_top(self._generation))
            for name, record in records.items()
            if record is not None
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    @staticmethod
    def _part(text: str, rows: dict[str, msgspec.Raw]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], **rows}

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
        num_input, num_output = self._generation.num_prompt_tokens, self._generation.num_completion_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }
