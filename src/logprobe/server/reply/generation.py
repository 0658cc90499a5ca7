"""One reply's generation: several engine requests followed as one row of pieces, whole or step by step.

Before it: checked prompts and parameters. After it: the shapes of chat, completions and responses. Whole and
streamed replies fold the same pieces; a whole reply only takes each completion's at its end.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from logprobe.text.pieces import Cutter, TextWalk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from logprobe.engine.request import CompletionOutput, CompletionPiece, RequestOutput
    from logprobe.records.values import IntArray
    from logprobe.sampling import SamplingParams
    from logprobe.server.service import Service

T = TypeVar("T")


class Generation:
    """The engine requests of one reply, `params.n` choices a prompt, numbered prompt by prompt."""

    def __init__(
        self,
        service: Service,
        reply_id: str,
        asks: Sequence[tuple[IntArray, SamplingParams]],
        echoes: Sequence[bytes] = (),
    ) -> None:
        """Check all prompts; `n`, stops and reports are the same for all of them.

        `echoes` are the prompts' texts where replies begin with these.

        Raises:
            ParameterError: one of them can never be served; nothing was started.
            ApiError: beyond a limit, or no room now.
        """
        self.reply_id = reply_id
        self.params = asks[0][1]
        self.outputs: dict[int, RequestOutput] = {}  # by prompt
        self._service = service
        requests = service.of_one_call()
        self._admitted = [
            requests.admit(ids, params, request_id=f"{reply_id}-{number}")
            for number, (ids, params) in enumerate(asks)
        ]
        self.requests = [one.request for one in self._admitted]
        self._cutters: dict[int, Cutter[CompletionOutput]] = {}
        self._echoes = echoes
        service.admit(self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(one.token_ids) for output in self.outputs.values() for one in output.outputs)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts, and those generated so far."""
        return self.num_prompt_tokens + self.num_completion_tokens

    def num_tokens_of(self, pieces: Sequence[CompletionPiece]) -> int:
        """Tokens that these pieces tell of; the first of a choice tells of its prompt as well."""
        begun = [self.requests[self.prompt_of(piece)] for piece in pieces if not piece.start]
        return sum(piece.num_rows for piece in pieces) + sum(len(one.prompt_token_ids) for one in begun)

    def prompt_of(self, piece: CompletionPiece) -> int:
        """Number of the prompt that a choice belongs to."""
        return piece.index // self.params.n

    async def run(self) -> None:
        """Wait until all have ended; `whole` then gives what came.

        Raises:
            LogprobeError: a request failed; the others were given up.
        """
        self.outputs = dict(enumerate(await self._service.run_all(self._admitted)))

    def whole(self) -> list[CompletionPiece]:
        """One piece a choice, in the order of their numbers; any thread may ask."""
        return [piece for number in range(len(self.requests)) for piece in self._cut(number)]

    async def stream(self) -> AsyncGenerator[list[CompletionPiece]]:
        """Pieces as they come; leaving early gives all requests up.

        Raises:
            LogprobeError: a request failed.
        """
        self._service.engine.submit(self._admitted)
        async with aclosing(merged([self._pieces(number) for number in range(len(self.requests))])) as all_:
            async for pieces in all_:
                yield pieces

    async def _pieces(self, number: int) -> AsyncGenerator[list[CompletionPiece]]:
        """What is new of one request, each time there is something."""
        service = self._service
        outputs = service.engine.stream(
            self.requests[number].request_id, buffer_rows=service.settings.buffer_rows
        )
        async with aclosing(outputs):
            async for output in outputs:
                self.outputs[number] = output
                if output.is_finished:
                    service.metrics.ended(output)
                if output.error is not None:
                    raise output.error
                if pieces := self._cut(number):
                    yield pieces

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
        return Cutter(
            self._service.text.bytes_of, self.params.stop, self.params.min_tokens, index=index, walk=walk
        )


async def merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """The items of all sources as they come; leaving early, or an error of one, closes them all."""
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
