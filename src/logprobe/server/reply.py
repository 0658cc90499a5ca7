"""Generate a reply, whole or streamed: run engine requests, cut outputs into pieces, encode the pieces.

Whole and streamed replies use the same code; a whole reply has a single piece per choice. A `Shape` converts
pieces to the format of a route. The size of a reply is measured in entries: tokens and their alternatives.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
from starlette.responses import Response

from logprobe.server.http.errors import as_api_error
from logprobe.server.http.replies import (
    DONE,
    EVENT_HEADERS,
    JSON_TYPE,
    StreamedReply,
    event,
    while_connected,
)
from logprobe.server.limits import row_entries
from logprobe.server.members import field_members
from logprobe.text.pieces import Cutter, TextWalk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence

    from starlette.requests import Request as HttpRequest

    from logprobe.engine.request import CompletionOutput, CompletionPiece, RequestOutput
    from logprobe.records.values import IntArray
    from logprobe.sampling import SamplingParams
    from logprobe.server.http.errors import ApiError
    from logprobe.server.members import FoundFields
    from logprobe.server.openai.bodies import ChatBody, CompletionBody, FieldLogprobs
    from logprobe.server.service import Service

T = TypeVar("T")
B = TypeVar("B", bound="ChatBody | CompletionBody")

logger = logging.getLogger("logprobe.server")


class Generation:
    """The engine requests of one reply: `params.n` choices per prompt, numbered prompt by prompt."""

    def __init__(
        self,
        service: Service,
        reply_id: str,
        prompts: Sequence[tuple[IntArray, SamplingParams]],
        echoes: Sequence[bytes] = (),
        *,
        field_logprobs: FieldLogprobs | None = None,
        shows_special: bool = False,
        hides_reasoning: bool = False,
    ) -> None:
        """Validate and admit all prompts, without starting them.

        Args:
            service: the `Service` for this HTTP request.
            reply_id: id of the reply.
            prompts: token ids and parameters; `n`, stop conditions and reports are the same for all prompts.
            echoes: the prompts' texts, if each choice begins with its prompt.
            field_logprobs: report the JSON fields in each choice; "members": score their alternative values.
            shows_special: texts contain special tokens, but not the one that ended the text.
            hides_reasoning: the reply leaves out the reasoning and its rows.

        Raises:
            ParameterError: a prompt or its parameters are invalid.
            ApiError: a limit is exceeded, or the free capacity is too small.
        """
        self.reply_id = reply_id
        self.params = prompts[0][1]
        self.hides_reasoning = hides_reasoning
        self.outputs: dict[int, RequestOutput] = {}  # by prompt
        self._service = service
        requests = service.of_one_call()
        self._admitted = [requests.admit(ids, params) for ids, params in prompts]
        self.requests = [admitted.request for admitted in self._admitted]
        self._cutters: dict[int, Cutter[CompletionOutput]] = {}
        self._echoes = echoes
        self._shows_special = shows_special
        self._num_echoes = self.params.n if echoes else 1  # times that a reply contains a prompt
        vocab_size = service.vocab_size
        self._prompt_row_entries = row_entries(self.params, self.params.prompt_logprobs, vocab_size) or 1
        stages = 2 if self.params.logprobs_mode == "both" else 1
        self._row_entries = stages * (row_entries(self.params, self.params.logprobs, vocab_size) or 1)
        num_choices = len(prompts) * self.params.n
        self.field_logprobs = field_logprobs
        has_members = field_logprobs == "members"
        self._members = field_members(service, self.params, num_choices) if has_members else None
        self.found: dict[int, FoundFields | None] = {}  # by choice
        service.admit(self.requests, self._num_echoes, None if self._members is None else self._members.cost)

    @property
    def num_choices(self) -> int:
        """Total number of choices for all prompts."""
        return len(self.requests) * self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Total number of tokens in all prompts."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache, once the requests have finished."""
        return num_cached(self.outputs.values())

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens generated so far."""
        return sum(
            len(completion.token_ids) for output in self.outputs.values() for completion in output.outputs
        )

    @property
    def num_entries(self) -> int:
        """Size (in entries) of the reply so far: prompt and completion tokens, and their alternatives."""
        num_entries = self._num_entries(self.num_prompt_tokens * self._num_echoes, self.num_completion_tokens)
        return num_entries + self._num_found(self.found)

    def num_entries_of(self, pieces: Sequence[CompletionPiece]) -> int:
        """Return the size (in entries) of pieces; a choice's first piece includes the prompt's entries."""
        requests = [self.requests[self.prompt_of(piece)] for piece in pieces if not piece.start]
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        num_entries = self._num_entries(num_prompt_tokens, sum(piece.num_rows for piece in pieces))
        return num_entries + self._num_found(piece.index for piece in pieces if piece.finish_reason)

    def _num_entries(self, num_prompt_tokens: int, num_completion_tokens: int) -> int:
        return num_prompt_tokens * self._prompt_row_entries + num_completion_tokens * self._row_entries

    def _num_found(self, choices: Iterable[int]) -> int:
        found = (self.found.get(index) for index in choices)
        return sum(one.num_entries for one in found if one is not None)

    def prompt_of(self, piece: CompletionPiece) -> int:
        """Return the index of the prompt to which a piece's choice belongs."""
        return piece.index // self.params.n

    async def run(self) -> None:
        """Run all requests to completion, after which `whole` returns the pieces.

        Raises:
            LogprobeError: a request failed; the others were aborted.
        """
        self.outputs = dict(enumerate(await self._service.run_all(self._admitted)))
        for number in self.outputs:
            await self._find_members(number)

    def whole(self) -> list[CompletionPiece]:
        """Return one piece per choice, in order; may be called from any thread."""
        return [piece for number in range(len(self.requests)) for piece in self._cut(number)]

    def whole_again(self) -> list[CompletionPiece]:
        """Return one piece per choice, in order, after all pieces of a stream were taken."""
        self._cutters.clear()
        return self.whole()

    async def stream(self) -> AsyncGenerator[list[CompletionPiece]]:
        """Yield pieces as they are generated; closing the generator aborts all requests.

        Raises:
            LogprobeError: a request failed.
        """
        sources = [self._pieces(number) for number in range(len(self.requests))]
        with self._service.engine.submitted(self._admitted):
            async with aclosing(merged(sources)) as all_:
                async for pieces in all_:
                    yield pieces

    async def _pieces(self, number: int) -> AsyncGenerator[list[CompletionPiece]]:
        """Yield the new pieces of one request as they are generated."""
        service = self._service
        outputs = service.engine.stream(
            self.requests[number].request_id, buffer_rows=service.settings.buffer_rows
        )
        async with aclosing(outputs):
            async for output in outputs:
                self.outputs[number] = output
                if output.is_finished:
                    service.ended(output)
                if output.error is not None:
                    raise output.error
                await self._find_members(number)
                if pieces := self._cut(number):
                    service.call.note_token()
                    yield pieces

    async def _find_members(self, number: int) -> None:
        """Score the possible values ("members") of the JSON fields in each finished choice.

        This happens before the choice's last piece is sent.
        """
        if self._members is None:
            return
        output = self.outputs[number]
        for place, completion in enumerate(output.outputs):
            index = number * self.params.n + completion.index
            if completion.finish_reason is not None and index not in self.found:
                self.found[index] = await self._members.found(output, place, self._admitted[number])

    def _cut(self, number: int) -> list[CompletionPiece]:
        pieces = []
        for completion in self.outputs[number].outputs:
            index = number * self.params.n + completion.index
            cutter = self._cutters.get(index)
            if cutter is None:
                cutter = self._cutters[index] = self._new_cutter(number, index)
            piece = cutter.take(completion)
            if piece is not None:
                pieces.append(piece)
        return pieces

    def _new_cutter(self, number: int, index: int) -> Cutter[CompletionOutput]:
        walk = TextWalk()
        if self._echoes:
            walk.feed(self._echoes[number])
        text = self._service.text
        return Cutter(
            text.bytes_of,
            self.params.stop,
            self.params.min_tokens,
            index=index,
            walk=walk,
            special_bytes_of=text.vocabulary.bytes_of if self._shows_special else None,
            shows_end=self.params.include_stop_str_in_output,
        )


async def merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the items of all sources as they arrive.

    All sources are closed if the generator is closed, or if one source raises an error.
    """
    waiting = {asyncio.ensure_future(anext(source, None)): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source, item = waiting.pop(task), task.result()
                if item is not None:
                    waiting[asyncio.ensure_future(anext(source, None))] = source
                    yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


class ChoicesShape(Generic[B]):
    """The common part of chat and text completion replies: envelope, usage and errors."""

    terminator = DONE
    closing_repeats_all = False
    kinds: ClassVar[tuple[str, str]]  # `object` of a whole reply and of a chunk

    def __init__(self, service: Service, body: B, generation: Generation) -> None:
        self._service, self._body, self._generation = service, body, generation
        options = body.stream_options
        self._has_usage = bool(options and options.include_usage)

    def closing(self) -> Iterator[dict[str, Any]]:
        """Yield the usage chunk if `stream_options.include_usage` is set."""
        if self._has_usage:
            yield self._frame([], is_chunk=True) | {"usage": usage(self._generation)}

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the error object, which is the same as in a reply without streaming."""
        return error.to_dict()

    def _frame(self, choices: list[dict[str, Any]], *, is_chunk: bool = False) -> dict[str, Any]:
        reply = {
            "id": self._generation.reply_id,
            "object": self.kinds[is_chunk],
            "created": self._service.now(),
            "model": self._service.name_of(self._body),
            "choices": choices,
        }
        return reply | {"usage": None} if self._has_usage else reply


class Shape(Protocol):
    """Converts pieces to the reply format of a route."""

    def whole(self, pieces: Sequence[CompletionPiece]) -> dict[str, Any]:
        """Return the whole reply, given one piece per choice."""

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks before any text."""

    def chunks(self, piece: CompletionPiece) -> Iterator[dict[str, Any]]:
        """Yield the chunks of one piece."""

    def closing(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks after all text."""

    closing_repeats_all: bool
    """True if the closing chunks repeat the whole reply."""

    def num_entries(self, pieces: Sequence[CompletionPiece]) -> int:
        """Return the cost (in entries) of writing pieces, not counting their log-probability rows."""

    @property
    def begun_entries(self) -> int:
        """Cost (in entries), per choice, of the beginning of the reply that the prompt already contains."""

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the error chunk of a failed stream."""

    @property
    def terminator(self) -> bytes:
        """Bytes that end a stream, whether successful or failed."""


async def answer_json(
    request: HttpRequest, service: Service, generation: Generation, shape: Shape, *, is_stream: bool
) -> Response:
    """Run a generation and return the reply as JSON, or as server-sent events."""
    if is_stream:
        return StreamedReply(
            _events(service, generation, shape),
            EVENT_HEADERS,
            check=service.check_engine,
            failed=lambda error: _failed(service, shape, as_api_error(error)),
        )
    await while_connected(request.receive, generation.run(), service.check_engine)
    write = partial(_whole, service, generation, shape)
    num_entries = generation.num_entries + generation.num_choices * shape.begun_entries
    data = await service.workers.write(write, num_entries)
    return Response(data, media_type=JSON_TYPE)


def _whole(service: Service, generation: Generation, shape: Shape) -> bytes:
    return encode(service, shape.whole(generation.whole()))


async def _events(service: Service, generation: Generation, shape: Shape) -> AsyncGenerator[bytes]:
    try:
        yield _joined(service, shape.opening())
        async with aclosing(generation.stream()) as batches:
            async for pieces in batches:
                write = partial(_pieces, service, shape, pieces)
                num_entries = generation.num_entries_of(pieces) + shape.num_entries(pieces)
                if data := await service.workers.write(write, num_entries):
                    yield data
        num_entries = generation.num_entries if shape.closing_repeats_all else 0
        closing = await service.workers.write(lambda: _joined(service, shape.closing()), num_entries)
        yield closing + shape.terminator
    except Exception as error:
        failure = as_api_error(error)
        if failure.code == "internal_error":
            logger.exception("a stream failed")
        yield _failed(service, shape, failure)


def _failed(service: Service, shape: Shape, error: ApiError) -> bytes:
    """Return the end of a failed stream: the error chunk and the terminator."""
    return _joined(service, iter([shape.failed(error)])) + shape.terminator


def _pieces(service: Service, shape: Shape, pieces: Sequence[CompletionPiece]) -> bytes:
    return b"".join(_joined(service, shape.chunks(piece)) for piece in pieces)


def _joined(service: Service, chunks: Iterator[dict[str, Any]]) -> bytes:
    """Encode chunks as server-sent events; a chunk's `type` is its event name."""
    return b"".join(event(encode(service, chunk), chunk.get("type")) for chunk in chunks)


def usage(generation: Generation) -> dict[str, Any]:
    """Return the `usage` object for the tokens generated so far."""
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    return usage_of(prompt, completion, generation.num_cached_tokens)


def usage_of(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return a `usage` object in OpenAI's format."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def num_cached(outputs: Iterable[RequestOutput]) -> int:
    """Count the prompt tokens found in the prefix cache, if the engine reports them."""
    return sum(output.num_cached_tokens or 0 for output in outputs)


def encode(service: Service, reply: dict[str, Any]) -> bytes:
    """Encode a reply as JSON and count its bytes in the metrics."""
    data = msgspec.json.encode(reply)
    service.metrics.bytes_out.inc(len(data))
    return data
