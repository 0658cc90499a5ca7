"""`Client`: what every front door calls, and `Requests`, the one maker of requests.

Before it: `LLM`, `AsyncLM`, the server's routes, the command line. After it: an engine, of which it knows the
protocol alone.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from logprobe.engine.request import CompletionOutput, Completions, RequestOutput
from logprobe.errors import BatchError, LogprobeError, ParameterError, require
from logprobe.sampling import SamplingParams
from logprobe.scoring import measures
from logprobe.scoring.score import Score
from logprobe.text.chat import as_conversations, lay_out
from logprobe.text.edge import as_token_ids
from logprobe.text.pieces import Cutter
from logprobe.transport.messages import Request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from contextlib import AbstractContextManager

    from logprobe.engine.protocol import EngineBackend, RowEngine
    from logprobe.records.values import IntArray
    from logprobe.text.chat import Conversations
    from logprobe.text.edge import TextEdge
    from logprobe.transport.messages import Admitted

Advance: TypeAlias = "Callable[[RequestOutput], None]"
"""Told of each output that has grown."""

Watch: TypeAlias = "Callable[[Sequence[Request]], AbstractContextManager[Advance | None]]"
"""Opened around some requests; gives what is told of their progress, or None where nobody looks."""

Prompt: TypeAlias = "str | Sequence[int]"
OnError: TypeAlias = Literal["raise", "return"]
ON_ERROR = ("raise", "return")
Truncation: TypeAlias = Literal["error", "left"]
TRUNCATIONS = ("error", "left")


class Requests:
    """Makes requests, each with an id of its own, and has the engine admit them."""

    def __init__(self, engine: RowEngine) -> None:
        self._engine = engine
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()

    def admit(
        self,
        prompt_token_ids: IntArray,
        params: SamplingParams,
        *,
        first_scored: int = 1,
        wants_row: bool = False,
        request_id: str | None = None,
    ) -> Admitted:
        """A request that the engine has said yes to; nothing runs yet.

        Raises:
            ParameterError: it can never be served.
        """
        request = Request(
            request_id=request_id or f"{self._prefix}-{next(self._numbers)}",
            prompt_token_ids=prompt_token_ids,
            params=params,
            first_scored=first_scored,
            wants_row=wants_row,
        )
        return self._engine.admit(request)


class Split(NamedTuple):
    """A context and its continuation as one sequence; the continuation begins at `start`."""

    token_ids: IntArray  # (num_tokens,) int32
    start: int


class Client:
    """Prompts, conversations and pairs in; outputs and scores out, in whatever event loop calls."""

    def __init__(self, engine: EngineBackend, text: TextEdge) -> None:
        self.engine = engine
        self.text = text
        self.requests = Requests(engine)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        watch: Watch | None = None,
        on_error: OnError = "raise",
        truncation: Truncation = "error",
    ) -> list[RequestOutput]:
        """The outputs of one prompt or many, in their order; see `LLM.generate`."""
        require(on_error in ON_ERROR, "on_error", f"must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        known = f"must be one of {', '.join(TRUNCATIONS)}, got {truncation!r}"
        require(truncation in TRUNCATIONS, "truncation", known)
        many = _as_prompts(prompts)
        asked = _as_params(params, len(many))

        def admit(place: int) -> Admitted:
            ids, one = self._as_ids(many[place]), asked[place]
            return self.requests.admit(self._last(ids, one) if truncation == "left" else ids, one)

        admitted = _each(admit, len(many), on_error)
        good = [one for one in admitted if not isinstance(one, LogprobeError)]
        ended = iter(await self.run(good, watch))
        outputs = [_refused(one) if isinstance(one, LogprobeError) else next(ended) for one in admitted]
        for prompt, output in zip(many, outputs, strict=True):
            output.prompt = prompt if isinstance(prompt, str) else None
        return checked(outputs, on_error)

    async def chat(
        self,
        messages: Conversations,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        watch: Watch | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """The next message of each conversation; see `LLM.chat`."""
        prompts = [lay_out(conversation, self.text) for conversation in as_conversations(messages)]
        ids = [self._laid_out_ids(prompt).tolist() for prompt in prompts]
        outputs = await self.generate(ids, params, watch=watch, on_error=on_error)
        for prompt, output in zip(prompts, outputs, strict=True):
            output.prompt = prompt
        return outputs

    async def score(
        self,
        pairs: Sequence[tuple[Prompt, Prompt]],
        params: SamplingParams,
        *,
        watch: Watch | None = None,
        unconditional: bool = False,
    ) -> list[Score]:
        """What the model gives continuations after their contexts; see `LLM.score`."""
        splits = [self.split(pair) for pair in pairs]
        alone = [self.alone(split) for split in splits] if unconditional else []
        # One batch: what is scored after nothing joins the same steps.
        outputs = checked(await self.run(self.admit_splits([*splits, *alone], params), watch), "raise")
        after_nothing: Sequence[RequestOutput | None] = outputs[len(splits) :] or [None] * len(splits)
        return [self.as_score(*each) for each in zip(splits, outputs, after_nothing, strict=False)]

    async def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput]:
        """The one output of a conversation's next message, each time it has grown.

        Raises:
            LogprobeError: what `text.chat.lay_out` and the engine refuse, or how the request failed.
        """
        ids = self._laid_out_ids(lay_out(messages, self.text))
        async with aclosing(self._grow(ids, params)) as outputs:
            async for output in outputs:
                yield output

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """The one output of a prompt, each time it has grown; see `LLM.stream`."""
        prompts, [asked] = _as_prompts(prompt), _as_params(params, 1)
        require(len(prompts) == 1, "prompt", f"must be one text or one list of ids, got {prompt!r:.60}")
        require(not asked.picks_best, "best_of", "compares whole completions; a stream cannot")
        [one] = prompts
        cutters: list[Cutter[CompletionOutput]] = [
            Cutter(self.text.bytes_of, asked.stop, asked.min_tokens) for _ in range(asked.num_samples)
        ]
        async with aclosing(self._grow(self._as_ids(one), asked)) as outputs:
            async for output in outputs:
                output.prompt = one if isinstance(one, str) else None
                for completion in output.outputs:
                    piece = cutters[completion.index].take(completion)
                    completion.text += "" if piece is None else piece.text
                yield output

    async def _grow(self, ids: IntArray, params: SamplingParams) -> AsyncGenerator[RequestOutput]:
        admitted = self.requests.admit(ids, params)
        self.engine.submit([admitted])
        async with aclosing(self.engine.stream(admitted.request.request_id)) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise output.error
                yield output

    async def run(self, admitted: Sequence[Admitted], watch: Watch | None = None) -> list[RequestOutput]:
        """The outputs of requests once all have ended, with their texts; giving up the wait gives them up."""
        requests = [one.request for one in admitted]
        with nullcontext() if watch is None else watch(requests) as advance:
            self.engine.submit(admitted)
            return await asyncio.gather(*(self._follow(one.request_id, advance) for one in requests))

    def split(self, pair: tuple[Prompt, Prompt]) -> Split:
        """A (context, continuation) pair as one sequence; see `TextEdge.encode_pair` for texts.

        Raises:
            ParameterError: no such pair, a text with ids, or nothing to score.
        """
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        require(is_pair, "pairs", f"must hold (context, continuation) pairs, got {pair!r:.60}")
        context, continuation = pair
        if isinstance(context, str) and isinstance(continuation, str):
            return Split(*self.text.encode_pair(context, continuation))
        if isinstance(context, str) or isinstance(continuation, str):
            raise ParameterError("pairs", "context and continuation must both be texts or both be ids")
        before = as_token_ids(context, "context") if len(context) else self.text.prefix()
        after = as_token_ids(continuation, "continuation")
        require(len(after) > 0, "continuation", "is empty; there is nothing to score")
        return Split(np.concatenate([before, after]), len(before))

    def alone(self, split: Split) -> Split:
        """The same continuation after nothing: the model's BOS, or its EOS."""
        prefix = self.text.prefix()
        return Split(np.concatenate([prefix, split.token_ids[split.start :]]), len(prefix))

    def admit_splits(
        self, splits: Sequence[Split], params: SamplingParams, request_ids: Sequence[str] | None = None
    ) -> list[Admitted]:
        """A request for each that scores the continuation; errors as `Requests.admit`."""
        names: Sequence[str | None] = request_ids or [None] * len(splits)
        return [
            self.requests.admit(split.token_ids, params, first_scored=split.start, request_id=name)
            for split, name in zip(splits, names, strict=True)
        ]

    def as_score(self, split: Split, output: RequestOutput, alone: RequestOutput | None = None) -> Score:
        """The score of what ended; with `alone`, the same continuation after nothing, also its PMI."""
        record = output.prompt_logprobs
        assert record is not None
        ids = split.token_ids[split.start :].tolist()
        unconditional = None
        if alone is not None:
            assert alone.prompt_logprobs is not None
            unconditional = measures.total(alone.prompt_logprobs[-len(ids) :].chosen_entries().logprobs)
        data = self.text.vocabulary.bytes_of(ids)
        return Score.of(ids, record, data, unconditional_logprob=unconditional)

    def _last(self, ids: IntArray, params: SamplingParams) -> IntArray:
        """The end of a prompt, as much as fits before what is to be generated."""
        limit = self.engine.capabilities().max_model_len
        # A prompt that is only scored may hold one token more: its last token is never run.
        room = limit - params.max_tokens if params.max_tokens else limit + 1
        return ids[-max(room, 1) :]

    async def _follow(self, request_id: str, advance: Advance | None) -> RequestOutput:
        if advance is None:
            output = await self.engine.result(request_id)
        else:
            async with aclosing(self.engine.stream(request_id)) as outputs:
                async for output in outputs:
                    advance(output)
        for completion in output.outputs:
            completion.text = self.text.text_of(completion.token_ids, completion.num_text_bytes)
        return output

    def _as_ids(self, prompt: Prompt | IntArray) -> IntArray:
        return self.text.encode(prompt) if isinstance(prompt, str) else as_token_ids(prompt)

    def _laid_out_ids(self, prompt: str) -> IntArray:
        return self.text.encode(prompt, add_special_tokens=False)


def _each(admit: Callable[[int], Admitted], count: int, on_error: OnError) -> list[Admitted | LogprobeError]:
    """What each admission gives; one that is refused is raised with its number, or returned."""
    admitted: list[Admitted | LogprobeError] = []
    for place in range(count):
        try:
            admitted.append(admit(place))
        except ParameterError as error:
            if count > 1:
                said = str(error).removeprefix(f"{error.parameter}: ")
                error.args = (f"{error.parameter}: number {place} of {count} {said}",)
            if on_error == "raise":
                raise
            admitted.append(error)
    return admitted


def _refused(error: LogprobeError) -> RequestOutput:
    """The output of a request that was never started."""
    failed = CompletionOutput(index=0, finish_reason="error", error=error)
    return RequestOutput(request_id="", outputs=Completions([failed]))


def checked(outputs: list[RequestOutput], on_error: OnError) -> list[RequestOutput]:
    """The outputs; a `BatchError` that holds them where some failed and that is to be raised."""
    errors: dict[int, LogprobeError] = {
        index: output.error for index, output in enumerate(outputs) if output.error is not None
    }
    if errors and on_error == "raise":
        raise BatchError(outputs, errors) from next(iter(errors.values()))
    return outputs


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    is_list = isinstance(prompts, Sequence | np.ndarray)
    known = "must be a text, a list of token ids, or a list of either"
    require(is_list, "prompts", f"{known}, got {prompts!r:.60}")
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]  # one prompt of ids
    return prompts  # type: ignore[return-value]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    is_list = isinstance(params, Sequence) and all(isinstance(one, SamplingParams) for one in params)
    require(is_list, "params", f"must be SamplingParams, or one a prompt, got {params!r:.60}")
    require(len(params) == count, "params", f"{len(params)} given for {count} prompts")
    return params
