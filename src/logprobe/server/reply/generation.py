"""One reply's generation: several engine requests followed as one row of pieces, whole or step by step.

Before it: checked prompts and parameters. After it: the shapes of chat, completions and responses. Whole and
streamed replies fold the same pieces; a whole reply only takes each completion's at its end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from logprobe.engine.request import Request
from logprobe.server.limits import Cost
from logprobe.text.pieces import Cutter, TextWalk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from logprobe.engine.request import CompletionOutput, CompletionPiece, RequestOutput
    from logprobe.records.values import IntArray
    from logprobe.sampling import SamplingParams
    from logprobe.server.limits import Ticket
    from logprobe.server.service import Service


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
        self.requests = [
            Request(
                request_id=f"{reply_id}-{number}",
                prompt_token_ids=ids,
                params=params,
            )
            for number, (ids, params) in enumerate(asks)
        ]
        self._cutters: dict[int, Cutter[CompletionOutput]] = {}
        self._echoes = echoes
        for request in self.requests:
            service.engine.check(request)
        self.ticket: Ticket = service.limits.admit(Cost.of(self.requests, service.vocab_size))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(one.token_ids) for output in self.outputs.values() for one in output.outputs)

    def prompt_of(self, piece: CompletionPiece) -> int:
        """Number of the prompt that a choice belongs to."""
        return piece.index // self.params.n

    async def whole(self) -> list[CompletionPiece]:
        """One piece a choice, in the order of their numbers, once all have ended.

        Raises:
            LogprobeError: a request failed; the others were given up.
        """
        try:
            outputs = await self._service.run_all(self.requests)
        finally:
            self.ticket.release()
        self.outputs = dict(enumerate(outputs))
        return [piece for number in range(len(self.requests)) for piece in self._cut(number)]

    async def stream(self) -> AsyncGenerator[list[CompletionPiece]]:
        """Pieces as they come; leaving early gives all requests up.

        Raises:
            LogprobeError: a request failed.
        """
        collector = self._service.collector
        self._service.open_reply(self.reply_id, [request.request_id for request in self.requests])
        pumps = asyncio.create_task(self._pump_all())
        try:
            async for batches in collector.stream(self.reply_id):
                yield [piece for batch in batches for piece in batch]
        finally:
            pumps.cancel()
            await asyncio.wait([pumps])
            self._service.close_reply(self.reply_id)
            self.ticket.release()

    async def _pump_all(self) -> None:
        collector = self._service.collector
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(self.requests)):
                    group.create_task(self._pump(number))
        except BaseExceptionGroup as errors:
            collector.finish(self.reply_id, errors.exceptions[0])
        else:
            collector.finish(self.reply_id)

    async def _pump(self, number: int) -> None:
        request = self.requests[number]
        self._service.engine.submit(request)
        async for output in self._service.engine.stream(request.request_id):
            self.outputs[number] = output
            if output.error is not None:
                self._service.metrics.ended(output)
                raise output.error
            pieces = self._cut(number)
            if pieces:
                rows = sum(piece.num_rows for piece in pieces)
                self._service.collector.add(self.reply_id, pieces, num_rows=rows)
        self._service.metrics.ended(output)

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
