"""`Client`: what every front door calls.

Before it: `LLM`, `AsyncLM`, the server's routes, the command line. After it: an engine, of which it knows the
protocol alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from logprobe.analysis import measures
from logprobe.analysis.score import Score, joined
from logprobe.analysis.uncertainty import self_certainty
from logprobe.engine.healing import Healer, scored, scored_total
from logprobe.engine.request import CompletionOutput, Completions, RequestOutput, Requests, check_vocabulary
from logprobe.engine.truncation import (
    check_truncation,
    cut_pair,
    cut_prompt,
    forced_params,
    joined_output,
    named_after,
)
from logprobe.errors import BatchError, LogprobeError, ParameterError, WeightsReplacedError, require
from logprobe.records.values import IdLists
from logprobe.sampling import SamplingParams
from logprobe.sampling.params import COUNTS, named_ids
from logprobe.text.boundary import Split, check_rule, split_texts
from logprobe.text.chat import ANSWER, as_conversations, lay_out, read_messages
from logprobe.text.edge import as_token_ids
from logprobe.text.pieces import Cutter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractContextManager

    from logprobe.analysis.uncertainty import DrawPlan, SampledAnswer
    from logprobe.analysis.windows import Truncation
    from logprobe.engine.front import Front
    from logprobe.records import FlatLogprobs
    from logprobe.records.values import IntArray
    from logprobe.text.boundary import BoundaryRule
    from logprobe.text.chat import Conversation, Conversations, Layout
    from logprobe.text.edge import TextEdge
    from logprobe.transport.messages import Admitted, Request

Advance: TypeAlias = "Callable[[RequestOutput], None]"
"""Told of each output that has grown."""

Watch: TypeAlias = "Callable[[Sequence[Request]], AbstractContextManager[Advance | None]]"
"""Opened around some requests; gives what is told of their progress, or None where nobody looks."""

Follow: TypeAlias = "Callable[[], Callable[[FlatLogprobs], bool] | None]"
"""Gives what is told the record of one completion each time it has grown; True gives the rest of it up."""

Prompt: TypeAlias = "str | Sequence[int]"
PairPart: TypeAlias = "Prompt | IntArray"
OnError: TypeAlias = Literal["raise", "return"]
ON_ERROR = ("raise", "return")
ROWS_BYTES = 1 << 26  # of whole rows that are held at once
T = TypeVar("T")
Result = TypeVar("Result", RequestOutput, Score)


class AskedPair(NamedTuple):
    """A pair to score, in as many requests as it takes; `alone` are those of the continuation by itself."""

    whole: Split
    splits: list[Split]
    alone_splits: list[Split]
    parts: list[Admitted]
    alone: list[Admitted]


PartResults: TypeAlias = "tuple[list[RequestOutput], list[float | LogprobeError | None]]"
"""The outputs of a pair's parts, and the sums over the bytes of those with healing."""


class Client:
    """Prompts, conversations and pairs in; outputs and scores out, in whatever event loop calls.

    All of them run on the LoRA weights `lora`; None: on those that their parameters name. None asks for more
    than `max_logprobs` alternatives a token; -1: any number.
    """

    def __init__(
        self, engine: Front, text: TextEdge, *, lora: str | None = None, max_logprobs: int = -1
    ) -> None:
        self.engine = engine
        self.text = text
        self.lora = lora
        self.max_logprobs = max_logprobs
        self.requests = Requests(engine)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        watch: Watch | None = None,
        on_error: OnError = "raise",
        truncation: Truncation = "error",
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """The outputs of one prompt or many, in their order; see `LLM.generate`."""
        _check_on_error(on_error)
        may_cut = truncation != "error"
        if may_cut:
            check_truncation(truncation)
        many = _as_prompts(prompts)
        asked, requests = self._asked(params, len(many)), self.requests.of_one_call()
        limit = self.engine.capabilities().max_model_len

        def admit(row: int) -> tuple[IntArray, list[Admitted]]:
            ids = self._as_ids(many[row], add_special_tokens=add_special_tokens)
            own = self._allowed(asked[row])
            parts = cut_prompt(ids, own, truncation, limit) if may_cut else [(ids, own, 1)]
            return ids, [requests.admit(part, params, first_scored=first) for part, params, first in parts]

        admitted = _each(admit, len(many), on_error)
        work = [part for reply in admitted if not isinstance(reply, LogprobeError) for part in reply[1]]
        ended = iter(await self.run(work, watch))
        outputs = []
        for prompt, reply in zip(many, admitted, strict=True):
            if isinstance(reply, LogprobeError):
                output = _refused(reply)
            else:
                ids, parts = reply
                output, *windows = (next(ended) for _ in parts)
                if windows:
                    output = joined_output(output, windows, ids)
            output.prompt = prompt if isinstance(prompt, str) else None
            outputs.append(output)
        return checked(outputs, on_error)

    async def chat(
        self,
        messages: Conversations,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        layout: Layout = ANSWER,
        watch: Watch | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """The next message of each conversation; see `LLM.chat`."""
        prompts = [lay_out(conversation, self.text, layout) for conversation in as_conversations(messages)]
        ids = [self._laid_out_ids(prompt).tolist() for prompt in prompts]
        outputs = await self.generate(ids, params, watch=watch, on_error=on_error)
        for prompt, output in zip(prompts, outputs, strict=True):
            output.prompt = prompt
        return outputs

    async def score(
        self,
        pairs: Sequence[tuple[PairPart, PairPart] | Split],
        params: SamplingParams,
        *,
        watch: Watch | None = None,
        sampling: SamplingParams | None = None,
        unconditional: bool = False,
        on_error: OnError = "raise",
        truncation: Truncation = "error",
        token_ids: Sequence[Any] | None = None,
        boundary: BoundaryRule = "auto",
    ) -> list[Score]:
        """Score continuations after their contexts; see `LLM.score`."""
        _check_on_error(on_error)
        check_truncation(truncation)
        check_rule(boundary)
        if token_ids is not None:
            remedy = "stand in the records of scores, which those of windows have not; cut the left end"
            require(truncation != "window", "token_ids", remedy)
            is_each = len(token_ids) == len(pairs)
            require(
                is_each, "token_ids", f"are given for {len(token_ids)} pairs, of which there are {len(pairs)}"
            )
        params = self._allowed(params)
        sampling = None if sampling is None else self._allowed(sampling)
        limit, requests = self.engine.capabilities().max_model_len, self.requests.of_one_call()

        def admit_splits(splits: Sequence[Split], asked: SamplingParams) -> list[Admitted]:
            return self.admit_splits(splits, asked, requests, sampling=sampling)

        def admit(row: int) -> AskedPair:
            split = self.split(pairs[row], boundary)
            asked = params if token_ids is None else self.with_named_ids(params, token_ids[row], split)
            splits = cut_pair(split, truncation, limit)
            alone = cut_pair(self.alone(split), truncation, limit) if unconditional else []
            return AskedPair(split, splits, alone, admit_splits(splits, asked), admit_splits(alone, params))

        admitted = _each(admit, len(pairs), on_error)
        good = [pair for pair in admitted if not isinstance(pair, LogprobeError)]
        # One batch: what is scored after nothing joins the same steps.
        work = [pair.parts for pair in good] + [pair.alone for pair in good]
        outputs = await self.run([*chain.from_iterable(work)], watch)
        ended = iter(outputs)
        groups = [[next(ended) for _ in parts] for parts in work]
        whole = [pair.splits for pair in good] + [pair.alone_splits for pair in good]
        splits = [*chain.from_iterable(whole)]
        healed = iter(await self.heal(splits, outputs, params.lora, requests, sampling))
        numbers = [[next(healed) for _ in parts] for parts in whole]
        results = [*zip(groups, numbers, strict=True)]
        pair_results = iter(zip(good, results[: len(good)], results[len(good) :], strict=True))
        scores = [
            Score.failed(pair) if isinstance(pair, LogprobeError) else self._score_of(*next(pair_results))
            for pair in admitted
        ]
        return checked(scores, on_error)

    def _score_of(self, asked: AskedPair, parts: PartResults, alone: PartResults) -> Score:
        """The score of a pair whose parts came to these outputs and sums over bytes."""
        outputs, healed = parts
        bare, bare_healed = alone
        failed = [output.error for output in outputs + bare]
        failed += [one for one in healed + bare_healed if isinstance(one, LogprobeError)]
        error = next((error for error in failed if error is not None), None)
        if error is not None:
            return Score.failed(error)
        numbers = [*zip(asked.splits, outputs, healed, strict=True)]
        scores = [self.as_score(split, output, _number(one)) for split, output, one in numbers]
        unconditional = None
        if bare:
            totals = zip(bare, bare_healed, strict=True)
            unconditional = measures.total([scored_total(output, _number(one)) for output, one in totals])
        if len(scores) == 1:
            return replace(scores[0], unconditional_logprob=unconditional)
        return joined(scores, self._scored_bytes(asked.whole), unconditional_logprob=unconditional)

    def _scored_bytes(self, split: Split) -> bytes:
        """Return the bytes of a continuation: of the given text, or of its tokens where it is ids."""
        if split.data is not None:
            return split.data
        data = self.text.vocabulary.bytes_of(split.continuation.tolist())
        return data if split.healing is None else data[len(data) - split.healing.num_bytes :]

    async def heal(
        self,
        splits: Sequence[Split],
        outputs: Sequence[RequestOutput],
        lora: str | None,
        requests: Requests,
        sampling: SamplingParams | None = None,
    ) -> list[float | LogprobeError | None]:
        """Sum the bytes of splits with healing, which came to `outputs`; see `Healer.logprobs`."""
        if all(split.healing is None for split in splits):
            return [None] * len(splits)
        return await Healer(self, lora, requests, sampling).logprobs(splits, outputs)

    async def draw(
        self, prompt: Prompt | Conversation, plan: DrawPlan, *, watch: Watch | None = None
    ) -> list[SampledAnswer]:
        """Answers to one prompt, each by a request of its own; see `LLM.uncertainty`."""
        has_cap = self.max_logprobs != -1
        allowed = f"must be {self.max_logprobs} or less (max_logprobs)"
        require(not has_cap or plan.k <= self.max_logprobs, "k", allowed, got=plan.k)
        remedy = "reads whole rows, which max_logprobs does not allow"
        require(not (has_cap and plan.reads_rows), "self_certainty", remedy)
        ids, requests = self._ids_of(prompt), self.requests.of_one_call()
        admitted = [requests.admit(ids, self._allowed(params)) for params in plan.params]
        outputs = checked(await self.run(admitted, watch, plan.growing), "raise")
        answers = self.as_answers(plan, outputs)
        if plan.reads_rows:
            lora = plan.params[0].lora
            answers = [await self._with_self_certainty(ids, answer, lora) for answer in answers]
            _check_loads({outputs[0].weights_number, self.engine.weights_number})
        return answers

    def as_answers(self, plan: DrawPlan, outputs: Sequence[RequestOutput]) -> list[SampledAnswer]:
        """What was drawn by a plan.

        Raises:
            WeightsReplacedError: not all of it by the same weights.
        """
        _check_loads({output.weights_number for output in outputs})
        return [plan.answer(output.outputs[0], self.text) for output in outputs]

    async def _with_self_certainty(
        self, prompt: IntArray, answer: SampledAnswer, lora: str | None
    ) -> SampledAnswer:
        """An answer scored once more, with few whole rows at a time."""
        params = self._allowed(SamplingParams(max_tokens=0, prompt_logprobs=-1, lora=lora))
        size = max(ROWS_BYTES // (8 * self.engine.capabilities().vocab_size), 1)
        ids = np.concatenate([prompt, np.array(answer.token_ids, np.int32)])
        total = 0.0
        for start in range(len(prompt), len(ids), size):
            [score] = await self.score([(ids[:start], ids[start : start + size])], params)
            assert score.record is not None, "a pair that fits has one"
            total += float((await asyncio.to_thread(self_certainty, score.record)).sum())
        return replace(answer, self_certainty=total / answer.num_tokens)

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
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput]:
        """The one output of a prompt, each time it has grown; see `LLM.stream`."""
        prompts, [asked] = _as_prompts(prompt), self._asked(params, 1)
        require(len(prompts) == 1, "prompt", "must be one text or one list of ids", got=prompt)
        require(not asked.picks_best, "best_of", "compares whole completions; a stream cannot")
        [text_or_ids] = prompts
        cutters: list[Cutter[CompletionOutput]] = [
            Cutter(self.text.bytes_of, asked.stop, asked.min_tokens) for _ in range(asked.num_samples)
        ]
        ids = self._as_ids(text_or_ids, add_special_tokens=add_special_tokens)
        async with aclosing(self._grow(ids, asked)) as outputs:
            async for output in outputs:
                output.prompt = text_or_ids if isinstance(text_or_ids, str) else None
                for completion in output.outputs:
                    piece = cutters[completion.index].take(completion)
                    completion.text += "" if piece is None else piece.text
                yield output

    async def _grow(self, ids: IntArray, params: SamplingParams) -> AsyncGenerator[RequestOutput]:
        admitted = self.requests.of_one_call().admit(ids, self._allowed(params))
        self.engine.submit([admitted])
        async with aclosing(self.engine.stream(admitted.request.request_id)) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise output.error
                yield output

    async def run(
        self,
        admitted: Sequence[Admitted],
        watch: Watch | None = None,
        follow: Follow | None = None,
    ) -> list[RequestOutput]:
        """The outputs of requests once all have ended, with their texts; giving up the wait gives them up.

        `follow` is for requests of one sample with numbers.
        """
        requests = [admission.request for admission in admitted]
        with nullcontext() if watch is None else watch(requests) as advance:
            self.engine.submit(admitted)
            return await asyncio.gather(
                *(self._follow(request.request_id, advance, follow) for request in requests)
            )

    def split(self, pair: tuple[PairPart, PairPart] | Split, boundary: BoundaryRule = "auto") -> Split:
        """A (context, continuation) pair as one sequence; see `split_texts` for texts.

        Raises:
            ParameterError: no such pair, a text with ids, or nothing to score.
        """
        if isinstance(pair, Split):
            return pair
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        require(is_pair, "pairs", "must hold (context, continuation) pairs", got=pair)
        context, continuation = pair
        if isinstance(context, str) and isinstance(continuation, str):
            return split_texts(self.text, context, [continuation], rule=boundary)[0]
        if isinstance(context, str) or isinstance(continuation, str):
            raise ParameterError("pairs", "context and continuation must both be texts or both be ids")
        before = as_token_ids(context, "context") if len(context) else self.text.prefix()
        after = as_token_ids(continuation, "continuation")
        require(len(after) > 0, "continuation", "is empty; there is nothing to score")
        return Split(np.concatenate([before, after]), len(before))

    def alone(self, split: Split) -> Split:
        """The same continuation after nothing: the model's BOS, or its EOS."""
        prefix, healing = self.text.prefix(), split.healing
        ids = np.concatenate([prefix, split.continuation])
        if healing is None:
            return Split(ids, len(prefix))
        moved = healing.moved(split.start - len(prefix))
        bare = replace(moved, first=len(prefix), tail=b"", text=healing.text[len(healing.tail) :])
        return Split(ids, len(prefix), bare)

    def admit_splits(
        self,
        splits: Sequence[Split],
        params: SamplingParams,
        requests: Requests,
        request_ids: Sequence[str] | None = None,
        *,
        sampling: SamplingParams | None = None,
    ) -> list[Admitted]:
        """A request for each that scores the continuation; errors as `Requests.admit`.

        It scores under what `sampling` would draw from; None: the model's own distribution.
        """
        names: Sequence[str | None] = request_ids or [None] * len(splits)
        return [
            _admit_scored(requests, split, params, name)
            if sampling is None
            else _admit_forced(requests, split, sampling, params, name)
            for split, name in zip(splits, names, strict=True)
        ]

    def with_named_ids(self, params: SamplingParams, token_ids: Any, split: Split) -> SamplingParams:
        """The same, asking for ids at all positions of a continuation, or position by position.

        Raises:
            ParameterError: no such ids, or another number of lists than of tokens, as `token_ids`.
        """
        name, count = "token_ids", len(split.continuation)
        ids = named_ids(name, token_ids)
        if ids is None and token_ids is not None:  # asked, if for none
            ids = IdLists.of([np.empty(0, np.int64)] * count)
        if isinstance(ids, IdLists):
            fits = len(ids) == count
            require(fits, name, f"has {len(ids)} lists for the {count} tokens of a continuation")
        check_vocabulary(name, ids, self.engine.capabilities().vocab_size)
        return replace(params, logprob_token_ids=ids)

    def as_score(
        self, split: Split, output: RequestOutput, healed: float | None = None, alone: float | None = None
    ) -> Score:
        """The score of what ended.

        Args:
            split: what was scored.
            output: of the request.
            healed: the log-probability of its bytes, where it has healing.
            alone: that of the same continuation after nothing, which gives the PMI.
        """
        ids = split.continuation.tolist()
        score = Score.of(ids, scored(output), self._scored_bytes(split), unconditional_logprob=alone)
        if split.healing is None:
            return score
        assert healed is not None, "its bytes were summed"
        return replace(score, logprob=healed, boundary="bytes")

    async def _follow(self, request_id: str, advance: Advance | None, follow: Follow | None) -> RequestOutput:
        is_over = None if follow is None else follow()
        if advance is None and is_over is None:
            output = await self.engine.result(request_id)
        else:
            async with aclosing(self.engine.stream(request_id)) as outputs:
                async for output in outputs:
                    if advance is not None:
                        advance(output)
                    if is_over is not None and is_over(_record(output)):
                        break
            if not output.is_finished:  # leaving its stream has given it up
                output.outputs[0].finish_reason = "abort"
                if advance is not None:
                    advance(output)
        for completion in output.outputs:
            if completion.token_ids:
                completion.text = self.text.text_of(completion.token_ids, completion.num_text_bytes)
        return output

    def _asked(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [self._allowed(params or SamplingParams())] * count
        is_list = isinstance(params, Sequence) and all(isinstance(item, SamplingParams) for item in params)
        require(is_list, "params", "must be SamplingParams, or one a prompt", got=params)
        require(len(params) == count, "params", f"{len(params)} given for {count} prompts")
        return params

    def _allowed(self, params: SamplingParams) -> SamplingParams:
        """The same on this client's LoRA weights."""
        for name in COUNTS if self.max_logprobs != -1 else ():
            asked = getattr(params, name)
            is_few = asked is None or 0 <= asked <= self.max_logprobs
            require(is_few, name, f"must lie in 0..{self.max_logprobs} (max_logprobs), got {asked}")
        if self.lora is None or params.lora == self.lora:
            return params
        remedy = f"is {params.lora!r}, but this view runs on {self.lora!r}; ask the model that was loaded"
        require(params.lora is None, "lora", remedy)
        return replace(params, lora=self.lora)

    def _as_ids(self, prompt: Prompt | IntArray, *, add_special_tokens: bool = True) -> IntArray:
        if isinstance(prompt, str):
            return self.text.encode(prompt, add_special_tokens=add_special_tokens)
        return as_token_ids(prompt)

    def _ids_of(self, prompt: Prompt | Conversation) -> IntArray:
        """The ids of one prompt, or of one conversation as the chat template lays it out."""
        given: Any = prompt
        is_list = isinstance(given, Sequence) and len(given) > 0
        if is_list and isinstance(given[0], Mapping):
            return read_messages(given, self.text)
        return self._as_ids(given)

    def _laid_out_ids(self, prompt: str) -> IntArray:
        return self.text.encode(prompt, add_special_tokens=False)


def _check_on_error(on_error: OnError) -> None:
    require(on_error in ON_ERROR, "on_error", f"must be one of {', '.join(ON_ERROR)}, got {on_error!r}")


def _check_loads(loads: set[int]) -> None:
    if len(loads) > 1:
        raise WeightsReplacedError("the model's weights were replaced amid the answers; ask again")


def _record(output: RequestOutput) -> FlatLogprobs:
    record = output.outputs[0].logprobs
    assert record is not None, "numbers were asked for"
    return record


def _number(healed: float | LogprobeError | None) -> float | None:
    assert not isinstance(healed, LogprobeError), "a pair that failed has no score"
    return healed


def _admit_scored(
    requests: Requests, split: Split, params: SamplingParams, request_id: str | None
) -> Admitted:
    asked = named_after(params, split.start)
    return requests.admit(split.token_ids, asked, first_scored=split.start, request_id=request_id)


def _admit_forced(
    requests: Requests,
    split: Split,
    sampling: SamplingParams,
    reports: SamplingParams,
    request_id: str | None,
) -> Admitted:
    """All positions at once; one after another where processors look at what came before."""
    forced = split.continuation
    asked = forced_params(sampling, len(forced), reports)
    admitted = requests.admit(split.context, asked, forced_token_ids=forced, request_id=request_id)
    if admitted.processor_args:
        return admitted
    at_once = named_after(
        replace(asked, max_tokens=0, min_tokens=0, prompt_logprobs=asked.logprobs), split.start
    )
    return requests.admit(
        split.token_ids, at_once, first_scored=split.start, scored_as=at_once, request_id=request_id
    )


def _each(admit: Callable[[int], T], count: int, on_error: OnError) -> list[T | LogprobeError]:
    """What each admission gives; one that is refused is raised with its number, or returned."""
    admitted: list[T | LogprobeError] = []
    for index in range(count):
        try:
            admitted.append(admit(index))
        except ParameterError as error:
            if count > 1:
                said = str(error).removeprefix(f"{error.parameter}: ")
                error.args = (f"{error.parameter}: number {index} of {count} {said}",)
            if on_error == "raise":
                raise
            admitted.append(error)
    return admitted


def _refused(error: LogprobeError) -> RequestOutput:
    """The output of a request that was never started."""
    failed = CompletionOutput(index=0, finish_reason="error", error=error)
    return RequestOutput(request_id="", outputs=Completions([failed]))


def checked(outputs: list[Result], on_error: OnError) -> list[Result]:
    """The outputs or scores; a `BatchError` that holds them where some failed and that is to be raised."""
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
    require(is_list, "prompts", known, got=prompts)
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]  # one prompt of ids
    return prompts  # type: ignore[return-value]
