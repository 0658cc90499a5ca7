"""OpenAI's `response` object and the events that stream it.

Reasoning, text and tool calls are separate output items, in the order of their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.server.reply_channels import ReplyChannels, ReplySegment, Splitter, grouped, text_of
from logprobe.server.rows import (
    call_fields,
    chat_rows,
    num_ending_entries,
    num_top,
    reply_extensions,
    segment_fields,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.engine.request import CompletionOutput, CompletionPiece
    from logprobe.server.http.errors import ApiError
    from logprobe.server.openai.bodies import ResponsesBody
    from logprobe.server.reply import Generation
    from logprobe.server.service import Service
    from logprobe.server.stored import Messages

ROWS: Final = ("logprobs", "processed_logprobs")
"""Fields with log-probability rows; a completion's records have the same names."""
NO_ROWS: Final = msgspec.Raw(b"[]")
PREFIXES: Final = {"content": "msg", "reasoning": "rs", "tool_call": "fc"}
"""Prefix of an item's id, by channel."""
TEXTS: Final = {"content": "response.output_text", "reasoning": "response.reasoning_text"}
"""Event type of a text item, by channel."""
CALL: Final = "response.function_call_arguments"
NOTHING: Final = ReplySegment("content", "", [])


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A validated and admitted request, with the conversation so far."""

    owner: bytes
    body: ResponsesBody
    messages: Messages
    generation: Generation
    splitter: Splitter


@dataclass(slots=True)
class _Item:
    """An output item with the segments that it has so far."""

    id: str
    index: int
    channel: str
    segments: list[ReplySegment] = field(default_factory=list)


class ResponseShape:
    """Writes a response as a whole object or as stream events."""

    terminator = b""  # clients recognize the last event by its type
    closing_repeats_all = True

    def __init__(self, service: Service, request: ResponsesRequest) -> None:
        self._service = service
        self._request = request
        self._body = request.body
        self._generation = request.generation
        self._splitter = request.splitter
        self._created_at = service.now()
        self._segments: list[ReplySegment] = []
        self._piece: CompletionPiece | None = None  # the latest piece
        self._item: _Item | None = None  # the item in progress
        self._output: list[dict[str, Any]] = []  # finished items
        self._num_events = 0

    def whole(self, pieces: Sequence[CompletionPiece]) -> dict[str, Any]:
        """Return the response; store it unless the request sets `store: false`."""
        (piece,) = pieces
        self._piece = piece
        self._segments += self._splitter.take(piece)
        groups = grouped(self._segments) or [[NOTHING]]
        for number, group in enumerate(groups, start=1):
            item = self._new_item(group[0])
            item.segments += group
            self._output.append(self._written(item, "completed" if number < len(groups) else self._status()))
        return self._ended()

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the events before any text."""
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        if not self._splitter.is_split:
            yield from self._begin(NOTHING)

    def chunks(self, piece: CompletionPiece) -> Iterator[dict[str, Any]]:
        """Yield the events for a piece's segments, with their rows; an item ends when another begins."""
        self._piece = piece
        for segment in self._splitter.take(piece):
            self._segments.append(segment)
            if self._item is not None and (segment.call is not None or segment.channel != self._item.channel):
                yield from self._end("completed")
            if self._item is None:
                yield from self._begin(segment)
            yield from self._go_on(segment)
            if segment.call is not None:
                yield from self._end("completed")

    @property
    def begun_entries(self) -> int:
        """Cost (in entries) of writing the beginning of the reply that the prompt already contains."""
        return self._splitter.begun_entries

    def num_entries(self, pieces: Sequence[CompletionPiece]) -> int:
        """Return the cost (in entries) of writing held-back text and the ends of items."""
        return sum(map(self._splitter.num_entries, pieces)) + num_ending_entries(
            self._body, self._generation, pieces
        )

    def closing(self) -> Iterator[dict[str, Any]]:
        """Yield the events that end the item in progress, then the event with the whole response."""
        if self._item is None and not self._output:
            yield from self._begin(NOTHING)
        if self._item is not None:
            yield from self._end(self._status())
        response = self._ended()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the `error` event."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    # -- events ----------------------------------------------------------------------------------------------

    def _begin(self, segment: ReplySegment) -> Iterator[dict[str, Any]]:
        """Start an item for a segment."""
        self._item = item = self._new_item(segment)
        begun = self._written(_Item(item.id, item.index, item.channel, [segment] if segment.call else []))
        yield self._event("response.output_item.added", output_index=item.index, item=begun)
        if segment.call is None:
            part = self._part(item)
            yield self._item_event("response.content_part.added", content_index=0, part=part)

    def _go_on(self, segment: ReplySegment) -> Iterator[dict[str, Any]]:
        assert self._item is not None, "_begin was called"
        self._item.segments.append(segment)
        if segment.call is not None:
            yield self._item_event(f"{CALL}.delta", delta=segment.call.arguments, **self._rows([segment]))
        else:
            kind, rows = f"{TEXTS[segment.channel]}.delta", self._text_rows(segment.channel, [segment])
            yield self._item_event(kind, content_index=0, delta=segment.text, **rows)

    def _end(self, status: str) -> Iterator[dict[str, Any]]:
        """Yield the events that finish the item in progress."""
        assert self._item is not None, "an item is in progress"
        item = self._item
        item.segments = item.segments or [NOTHING]
        written = self._written(item, status)
        if item.channel == "tool_call":
            rows = {name: written[name] for name in ROWS if name in written}
            yield self._item_event(
                f"{CALL}.done", name=written["name"], arguments=written["arguments"], **rows
            )
        else:
            (part,) = written["content"]
            rows = {name: part[name] for name in ROWS if name in part}
            yield self._item_event(f"{TEXTS[item.channel]}.done", content_index=0, text=part["text"], **rows)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=item.index, item=written)
        self._output.append(written)
        self._item = None

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._item is not None, "an item is in progress"
        return self._event(kind, item_id=self._item.id, output_index=self._item.index, **fields)

    # -- items -----------------------------------------------------------------------------------------------

    def _new_item(self, segment: ReplySegment) -> _Item:
        index = len(self._output)
        own_id = self._generation.reply_id.replace("resp", PREFIXES[segment.channel], 1)
        return _Item(f"{own_id}-{index}" if index else own_id, index, segment.channel)

    def _written(self, item: _Item, status: str | None = None) -> dict[str, Any]:
        """Return an item as JSON: finished if `status` is given, otherwise empty, as when it begins."""
        label = {"id": item.id, "status": status or "in_progress"}
        if item.channel == "tool_call":
            return self._written_call(item.segments[0], label, has_ended=status is not None)
        parts = [] if status is None else [self._part(item, has_ended=True)]
        if item.channel == "reasoning":
            return {**label, "type": "reasoning", "summary": [], "content": parts}
        return {**label, "type": "message", "role": "assistant", "content": parts}

    def _written_call(
        self, segment: ReplySegment, label: dict[str, str], *, has_ended: bool
    ) -> dict[str, Any]:
        assert segment.call is not None, "segments of this channel are calls"
        call = {"type": "function_call", "call_id": segment.call_id, "name": segment.call.name}
        if not has_ended:
            return {**label, **call, "arguments": ""}
        # A call segment is always complete, even if the reply is cut off later.
        done = {
            **label,
            **call,
            "status": "completed",
            "arguments": segment.call.arguments,
            **self._rows([segment]),
        }
        return done | (
            {"fields": call_fields(self._completion, segment)} if self._body.field_logprobs else {}
        )

    def _part(self, item: _Item, *, has_ended: bool = False) -> dict[str, Any]:
        """Return the content part of an item, with its text and rows."""
        text, rows = text_of(item.segments), self._text_rows(item.channel, item.segments)
        if item.channel == "reasoning":
            return {"type": "reasoning_text", "text": text, **rows}
        has_fields = has_ended and self._body.field_logprobs
        found = self._generation.found.get(0)
        fields = {"fields": segment_fields(self._completion, item.segments, found)} if has_fields else {}
        return {"type": "output_text", "text": text, "annotations": [], **rows, **fields}

    def _text_rows(self, channel: str, segments: Sequence[ReplySegment]) -> dict[str, msgspec.Raw]:
        """Return the rows of a text; as in OpenAI's API, content without rows has an empty list."""
        return ({"logprobs": NO_ROWS} if channel == "content" else {}) | self._rows(segments)

    def _rows(self, segments: Sequence[ReplySegment]) -> dict[str, msgspec.Raw]:
        """Return the rows of segments under each requested distribution, by field name."""
        records = {name: getattr(self._completion, name) for name in ROWS} if segments else {}
        return {
            name: chat_rows(self._service, record, segments, num_top(self._generation))
            for name, record in records.items()
            if record is not None
        }

    @property
    def _completion(self) -> CompletionOutput:
        assert self._piece is not None, "a piece has arrived"
        return self._piece.completion

    # -- the response ----------------------------------------------------------------------------------------

    def _status(self) -> str:
        assert self._piece is not None, "the reply has ended"
        return "completed" if self._piece.finish_reason == "stop" else "incomplete"

    def _ended(self) -> dict[str, Any]:
        response = self._response(self._status(), self._output) | {"usage": self._usage()}
        output = self._generation.outputs[0]
        response |= reply_extensions(self._body, self._generation.params, output)
        if self._body.store is not False:
            messages = [*self._request.messages, _message(ReplyChannels.of(self._segments))]
            self._service.stored.keep(self._request.owner, response, messages)
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, is_cut = self._body, status == "incomplete"
        asked = (
            {}
            if body.reasoning is None
            else {"reasoning": {"effort": body.reasoning.effort, "summary": None}}
        )
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
            "parallel_tool_calls": bool(body.tools) and body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": self._generation.params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._generation.params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            **asked,
        }

    def _usage(self) -> dict[str, Any]:
        num_input, num_output = self._generation.num_prompt_tokens, self._generation.num_completion_tokens
        num_reasoning = sum(len(segment.rows) for segment in self._segments if segment.channel == "reasoning")
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self._generation.num_cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_input + num_output,
        }


def _message(channels: ReplyChannels) -> dict[str, Any]:
    """Return the reply as an assistant message, for the stored conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": text_of(channels.content)}
    if channels.reasoning:
        message["reasoning_content"] = text_of(channels.reasoning)
    calls = [(segment.call_id, segment.call) for segment in channels.calls if segment.call is not None]
    if calls:
        message["tool_calls"] = [
            {"id": own_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for own_id, call in calls
        ]
    return message
