"""`POST /v1/chat/completions`: OpenAI's chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from logprobe.server.answers import answer
from logprobe.server.http.decode import read
from logprobe.server.openai.bodies import ChatBody
from logprobe.server.openai.fields import chat_params, named_as_asked
from logprobe.server.openai.prompts import encode_laid_out, kept_tokens, layout_of, render_messages
from logprobe.server.openai.tools import NO_TOOLS, tools_of
from logprobe.server.reply import ChoicesShape, Generation, usage
from logprobe.server.reply_channels import ReplyChannels, Splitter, text_of
from logprobe.server.rows import (
    chat_logprobs,
    choice_extensions,
    ending_extensions,
    num_ending_entries,
    prompt_extensions,
    reply_extensions,
    route_extensions,
    stop_reason,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from logprobe.engine.request import CompletionPiece
    from logprobe.records.values import IntArray
    from logprobe.sampling import SamplingParams
    from logprobe.server.openai.bodies import ResponsesBody
    from logprobe.server.openai.tools import Tools
    from logprobe.server.reply_channels import ReplySegment
    from logprobe.server.service import Service


async def chat_completions(request: HttpRequest, service: Service) -> Response:
    """Create a chat completion."""
    chat = await read(request, service, ChatBody, prepare)
    shape = ChatShape(service, chat)
    return await answer(request, service, chat.generation, shape, is_stream=bool(chat.body.stream))


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated and admitted request."""

    body: ChatBody
    generation: Generation
    splitter: Splitter


def prepare(body: ChatBody, service: Service) -> ChatRequest:
    """Validate a chat request, and reserve capacity for it."""
    service.choose_weights(body)
    service.log_body("chat", body)
    if body.return_tokens_as_token_ids:
        service.write_ids()
    has_tools = body.tools is not None or body.tool_choice is not None
    tools = tools_of(body, service.reply_form()) if has_tools else NO_TOOLS
    layout, is_whole = layout_of(body, service, tools.functions), body.truncate_prompt_tokens is None
    prompt = render_messages(body.messages, service, layout, is_whole=is_whole)
    ids = encode_laid_out(prompt, service, add_special_tokens=bool(body.add_special_tokens))
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    ids = ids[kept_tokens(body, limit, service)]
    reply_id = service.reply_id("chatcmpl", body.request_id)
    generation, splitter = admit_reply(service, body, prompt, ids, tools, chat_params, reply_id)
    return ChatRequest(body, generation, splitter)


def admit_reply(
    service: Service,
    body: ChatBody | ResponsesBody,
    prompt: str,
    ids: IntArray,
    tools: Tools,
    params_of: Callable[..., SamplingParams],
    reply_id: str,
) -> tuple[Generation, Splitter]:
    """Validate a request for a reply and reserve capacity for it; return its generation and its splitter.

    Args:
        service: the service for this HTTP request.
        body: the request body.
        prompt: the rendered conversation.
        ids: token ids of `prompt`.
        tools: the request's tools.
        params_of: converts the body to sampling parameters: `chat_params` or `responses_params`.
        reply_id: id of the reply.
    """
    room = service.capabilities.max_model_len + 1 - len(ids)
    calls = None if tools.form is None else tools.call_format(prompt)
    with named_as_asked(body, is_call=calls is not None):
        params = params_of(body, service.settings, calls, room=room)
        generation = Generation(
            service,
            reply_id,
            [(ids, params)],
            field_logprobs=body.field_logprobs,
            shows_special=getattr(body, "skip_special_tokens", None) is False,
            hides_reasoning=getattr(body, "include_reasoning", None) is False,
        )
    is_formed = calls is None and params.response_format is not None
    return generation, Splitter(service, prompt, tools.functions, is_formed=is_formed)


class ChatShape(ChoicesShape[ChatBody]):
    """OpenAI's `chat.completion` and its chunks."""

    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(self, service: Service, request: ChatRequest) -> None:
        super().__init__(service, request.body, request.generation)
        self._splitter = request.splitter
        self._has_sent_prompt = False

    def whole(self, pieces: Sequence[CompletionPiece]) -> dict[str, Any]:
        """Return the reply, with one choice per completion."""
        output = self._generation.outputs[0]
        reply = self._frame([self._choice(piece) for piece in pieces])
        reply["usage"] = usage(self._generation)
        extensions = prompt_extensions(self._service, self._body, output)
        return reply | extensions | reply_extensions(self._body, self._generation.params, output)

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield a chunk with the role for each choice."""
        for index in range(self._generation.params.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, piece: CompletionPiece) -> Iterator[dict[str, Any]]:
        """Yield one chunk per segment, with the segment's rows, and then a chunk with the finish reason."""
        extras = choice_extensions(self._body, piece)
        num_calls = self._splitter.num_calls(piece.index)
        groups = [[segment] for segment in self._reported(self._splitter.take(piece))]
        for segments in groups or [[]] * bool(extras and piece.num_rows):
            channels = ReplyChannels.of(segments)
            logprobs = chat_logprobs(self._service, self._generation, piece.completion, channels)
            yield self._chunk(piece.index, _delta(channels, num_calls), logprobs, **extras) | self._prompt()
            num_calls += len(channels.calls)
            extras = {}  # they cover the whole piece, so only the first chunk has them
        if piece.finish_reason:
            reason, ending = self._end(piece)
            yield self._chunk(piece.index, {}, finish_reason=reason, **ending) | self._prompt()

    @property
    def begun_entries(self) -> int:
        """Cost (in entries), per choice, of the beginning of the reply that the prompt already contains."""
        return self._splitter.begun_entries

    def num_entries(self, pieces: Sequence[CompletionPiece]) -> int:
        """Return the cost (in entries) of writing held-back text and the ends of choices."""
        return sum(map(self._splitter.num_entries, pieces)) + num_ending_entries(
            self._body, self._generation, pieces
        )

    def _choice(self, piece: CompletionPiece) -> dict[str, Any]:
        channels = ReplyChannels.of(self._reported(self._splitter.take(piece)))
        reason, ending = self._end(piece)
        return {
            "index": piece.index,
            "message": _message(channels),
            "logprobs": chat_logprobs(self._service, self._generation, piece.completion, channels),
            "finish_reason": reason,
            **choice_extensions(self._body, piece),
            **ending,
        }

    def _reported(self, segments: Sequence[ReplySegment]) -> list[ReplySegment]:
        """Return the segments to report: all, or all but reasoning if `include_reasoning` is false."""
        has_all = self._body.include_reasoning is not False
        return [segment for segment in segments if has_all or segment.channel != "reasoning"]

    def _end(self, piece: CompletionPiece) -> tuple[str | None, dict[str, Any]]:
        """Return the finish reason of a choice, and the fields of its last chunk."""
        channels = ReplyChannels.of(self._splitter.all_of(piece.index))
        has_called = bool(channels.calls) and piece.finish_reason == "stop"
        reason = "tool_calls" if has_called else piece.finish_reason
        is_split = self._splitter.is_split
        found = self._generation.found.get(piece.index)
        ending = {"stop_reason": stop_reason(piece)} | ending_extensions(
            self._service, self._body, piece, found, channels if is_split else None
        )
        return reason, ending | route_extensions(self._body, self._generation.outputs[0], piece)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **extras: Any,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._frame([choice | extras], is_chunk=True)

    def _prompt(self) -> dict[str, Any]:
        """Return the prompt's fields for the first chunk, and {} for all later chunks."""
        if self._has_sent_prompt:
            return {}
        self._has_sent_prompt = True
        output = self._generation.outputs[0]
        extensions = prompt_extensions(self._service, self._body, output)
        return extensions | reply_extensions(self._body, self._generation.params, output)


def _message(channels: ReplyChannels) -> dict[str, Any]:
    """Return the assistant's message; as in OpenAI's API, a message with only tool calls has null content."""
    text = text_of(channels.content)
    content = None if channels.calls and not text else text
    calls = {"tool_calls": [_call(segment) for segment in channels.calls]} if channels.calls else {}
    return {"role": "assistant", "content": content, "refusal": None, **_reasoning(channels), **calls}


def _delta(channels: ReplyChannels, num_calls: int) -> dict[str, Any]:
    """Return the delta of a chunk; `num_calls` is the number of earlier tool calls."""
    calls = [{"index": number, **_call(segment)} for number, segment in enumerate(channels.calls, num_calls)]
    if calls or channels.reasoning:
        return _reasoning(channels) | ({"tool_calls": calls} if calls else {})
    return {"content": text_of(channels.content)}


def _reasoning(channels: ReplyChannels) -> dict[str, str]:
    """Return the reasoning under both field names in use (vLLM, DeepSeek)."""
    if not channels.reasoning:
        return {}
    return dict.fromkeys(("reasoning_content", "reasoning"), text_of(channels.reasoning))


def _call(segment: ReplySegment) -> dict[str, Any]:
    assert segment.call is not None, "segments of this channel are calls"
    function = {"name": segment.call.name, "arguments": segment.call.arguments}
    return {"id": segment.call_id, "type": "function", "function": function}
