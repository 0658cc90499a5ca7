"""`Client`: generate, chat and stream over an engine's `Front`; used by `LLM` and the server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from logprobe.engine.request import CompletionOutput, RequestOutput, Requests
from logprobe.engine.truncation import check_truncation, cut_prompt, joined_output
from logprobe.errors import BatchError, LogprobeError, ParameterError, require
from logprobe.sampling import SamplingParams
from logprobe.sampling.params import COUNTS
from logprobe.text.chat import ANSWER, as_conversations, lay_out, read_messages
from logprobe.text.edge import as_token_ids
from logprobe.text.pieces import Cutter
from logprobe.text.prompts import as_prompts, is_prompt_dict, plain_prompt, text_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractContextManager

    from logprobe.engine.front import Front
    from logprobe.engine.truncation import Truncation
    from logprobe.records import FlatLogprobs
    from logprobe.records.values import IntArray
    from logprobe.text.chat import Conversation, Conversations, Layout
    from logprobe.text.edge import TextEdge
    from logprobe.text.prompts import Prompt
    from logprobe.transport.messages import Admitted, Lens, Request

Advance: TypeAlias = "Callable[[RequestOutput], None]"
"""Progress callback, called with a request's output each time the output has grown."""

Watch: TypeAlias = "Callable[[Sequence[Request]], AbstractContextManager[Advance | None]]"
"""Given a batch of requests, returns a context manager that is open while they run.

The context manager yields a progress callback, or None.
"""

Follow: TypeAlias = "Callable[[], Callable[[FlatLogprobs], bool] | None]"
"""Called once per request; returns a callback, or None.

The callback is called with the completion's record each time the record has grown; it returns True to abort
the request.
"""

OnError: TypeAlias = Literal["raise", "return"]
ON_ERROR = ("raise", "return")
T = TypeVar("T")
Result = TypeVar("Result", bound="MayFail")


class MayFail(Protocol):
    """An output or a score, which may have failed."""

    @property
    def error(self) -> LogprobeError | None:
        """The error that ended it; None if it succeeded."""


class Client:
    """Runs prompts and conversations on an engine, in the caller's event loop.

    Args:
        engine: front end that runs the requests.
        text: the model's tokenizer and chat template.
        lora: name of the LoRA adapter for all requests; None: it is taken from each request's parameters.
        max_logprobs: maximum number of alternatives per token in a request; -1: no limit.
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
        """Generate completions for one or many prompts; return outputs in prompt order (`LLM.generate`)."""
        check_on_error(on_error)
        may_cut = truncation != "error"
        if may_cut:
            check_truncation(truncation)
        many = as_prompts(prompts)
        asked, requests = self._asked(params, len(many)), self.requests.of_one_call()
        limit = self.engine.capabilities().max_model_len

        def admit(row: int) -> tuple[IntArray, list[Admitted]]:
            ids = self._as_ids(plain_prompt(many[row]), add_special_tokens=add_special_tokens)
            own = self.allowed_params(asked[row])
            parts = cut_prompt(ids, own, truncation, limit) if may_cut else [(ids, own, 1)]
            return ids, [requests.admit(part, params, first_scored=first) for part, params, first in parts]

        admitted = admit_each(admit, len(many), on_error)
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
            output.prompt = text_of(prompt)
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
        """Generate the next message of each conversation; see `LLM.chat`."""
        prompts = [lay_out(conversation, self.text, layout) for conversation in as_conversations(messages)]
        ids = [self._laid_out_ids(prompt).tolist() for prompt in prompts]
        outputs = await self.generate(ids, params, watch=watch, on_error=on_error)
        for prompt, output in zip(prompts, outputs, strict=True):
            output.prompt = prompt
        return outputs

    async def lens(self, prompt: Prompt, lens: Lens, *, add_special_tokens: bool = True) -> RequestOutput:
        """Compute the predictions of a model's layers after each token of a prompt (`LLM.logit_lens`)."""
        prompts = as_prompts(prompt)
        require(len(prompts) == 1, "text", "must be one text, list of token ids or dict", got=prompt)
        self.scoring_params(lens.k)
        ids = self._as_ids(plain_prompt(prompts[0]), add_special_tokens=add_special_tokens)
        params = self.allowed_params(SamplingParams(max_tokens=0))
        [output] = checked(await self.run([self.requests.admit(ids, params, lens=lens)]), "raise")
        return output

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput]:
        """Generate from one prompt; yield the same output object each time it has grown (`LLM.stream`)."""
        prompts, [asked] = as_prompts(prompt), self._asked(params, 1)
        require(len(prompts) == 1, "prompt", "must be one string, list of token ids or dict", got=prompt)
        require(not asked.picks_best, "best_of", "cannot be streamed; leave it out, or use generate")
        [only] = prompts
        cutters: list[Cutter[CompletionOutput]] = [
            Cutter(self.text.bytes_of, asked.stop, asked.min_tokens) for _ in range(asked.num_samples)
        ]
        ids = self._as_ids(plain_prompt(only), add_special_tokens=add_special_tokens)
        async with aclosing(self._grow(ids, asked)) as outputs:
            async for output in outputs:
                output.prompt = text_of(only)
                for completion in output.outputs:
                    piece = cutters[completion.index].take(completion)
                    completion.text += "" if piece is None else piece.text
                yield output

    async def _grow(self, ids: IntArray, params: SamplingParams) -> AsyncGenerator[RequestOutput]:
        admitted = self.requests.of_one_call().admit(ids, self.allowed_params(params))
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
        """Submit requests, wait until all have ended, and return their outputs with decoded texts.

        Cancellation aborts the requests. With `follow`, every request must have one sample and `logprobs`.
        """
        requests = [admission.request for admission in admitted]
        with (
            nullcontext() if watch is None else watch(requests) as advance,
            self.engine.submitted(admitted),
        ):
            return await asyncio.gather(
                *(self._follow(request.request_id, advance, follow) for request in requests)
            )

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
            if not output.is_finished:  # leaving the stream aborted the request
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
            return [self.allowed_params(params or SamplingParams())] * count
        is_list = isinstance(params, Sequence) and all(isinstance(item, SamplingParams) for item in params)
        require(
            is_list,
            "sampling_params",
            "must be a SamplingParams, or a list with one for each prompt",
            got=params,
        )
        require(
            len(params) == count,
            "sampling_params",
            f"has {len(params)} items for {count} prompts; give one per prompt, or a single SamplingParams",
        )
        return params

    def allowed_params(self, params: SamplingParams) -> SamplingParams:
        """Check the parameters against this client's limits; return them with its LoRA adapter set.

        Raises:
            ParameterError: the parameters ask for more than `max_logprobs` alternatives, or name LoRA weights
                other than the client's.
        """
        for name in COUNTS if self.max_logprobs != -1 else ():
            asked = getattr(params, name)
            is_few = asked is None or 0 <= asked <= self.max_logprobs
            require(is_few, name, f"must be between 0 and {self.max_logprobs} (max_logprobs), got {asked}")
        if self.lora is None or params.lora == self.lora:
            return params
        remedy = (
            f"is {params.lora!r}, but this model was made by with_lora({self.lora!r}); use the original LLM"
        )
        require(params.lora is None, "lora", remedy)
        return replace(params, lora=self.lora)

    def scoring_params(self, logprobs: int, **columns: Any) -> SamplingParams:
        """Return parameters that report the logprobs of a prompt and `logprobs` alternatives per token.

        Raises:
            ParameterError: the errors of `allowed_params` and `SamplingParams`, with the name `logprobs`.
        """
        known = "must be 0 or more, or -1 for the whole vocabulary"
        is_count = isinstance(logprobs, int | np.integer) and logprobs >= -1
        require(is_count, "logprobs", known, got=logprobs)
        try:
            params = SamplingParams(max_tokens=0, prompt_logprobs=logprobs, **columns)
            return self.allowed_params(params)
        except ParameterError as error:
            if error.parameter != "prompt_logprobs":
                raise
            raise ParameterError("logprobs", str(error).removeprefix("prompt_logprobs: ")) from error

    def _as_ids(self, prompt: Any, *, add_special_tokens: bool = True) -> IntArray:
        if isinstance(prompt, str):
            return self.text.encode(prompt, add_special_tokens=add_special_tokens)
        return as_token_ids(prompt)

    def ids_of(self, prompt: Prompt | Conversation) -> IntArray:
        """Return the token ids of one prompt, or of one conversation formatted by the chat template."""
        given: Any = prompt
        is_list = isinstance(given, Sequence) and len(given) > 0
        if is_list and isinstance(given[0], Mapping) and not is_prompt_dict(given[0]):
            return read_messages(given, self.text)
        return self._as_ids(plain_prompt(given))

    def _laid_out_ids(self, prompt: str) -> IntArray:
        return self.text.encode(prompt, add_special_tokens=False)


def check_on_error(on_error: OnError) -> None:
    """Raise `ParameterError` if the value is not in `ON_ERROR`."""
    require(on_error in ON_ERROR, "on_error", f"must be one of {', '.join(ON_ERROR)}, got {on_error!r}")


def _record(output: RequestOutput) -> FlatLogprobs:
    record = output.outputs[0].logprobs
    assert record is not None, "`follow` requires logprobs"
    return record


def admit_each(admit: Callable[[int], T], count: int, on_error: OnError) -> list[T | LogprobeError]:
    """Call `admit` with each index in range(count) and return the results.

    The error of a rejected request names the request's index. It is raised or, with `on_error="return"`,
    takes the place of the result.
    """
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
    """Return a failed output for a request that was rejected before it started."""
    failed = CompletionOutput(index=0, finish_reason="error", error=error)
    return RequestOutput(request_id="", outputs=[failed])


def checked(outputs: list[Result], on_error: OnError) -> list[Result]:
    """Return `outputs` unchanged if none failed or failures are to be returned.

    Raises:
        BatchError: an output failed and `on_error` is `raise`; the error holds all outputs.
    """
    errors: dict[int, LogprobeError] = {
        index: output.error for index, output in enumerate(outputs) if output.error is not None
    }
    if errors and on_error == "raise":
        raise BatchError(outputs, errors) from next(iter(errors.values()))
    return outputs
