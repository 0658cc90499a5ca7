"""`LLM`: the offline front door, many prompts at once.

A thin bridge: each call submits its requests to the engine's async core and waits for their ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np

from logprobe.config import EngineConfig
from logprobe.errors import BatchError, LogprobeError, ParameterError, require
from logprobe.sampling import SamplingParams
from logprobe.scoring import measures
from logprobe.scoring.progress import byte_bar
from logprobe.scoring.score import Score
from logprobe.scoring.windows import perplexity
from logprobe.text.chat import lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    from logprobe.engine.request import Request, RequestOutput
    from logprobe.records.values import IntArray
    from logprobe.scoring.windows import Perplexity


@contextmanager
def progress_bar(
    requests: Sequence[Request], *, shown: bool
) -> Iterator[Callable[[RequestOutput], None] | None]:
    """A bar over the tokens of all requests; call what it yields with each output that has grown.

    None is yielded where there is nobody to show it to.
    """
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield None
        return
    tally = Tally(requests)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"0/{tally.total:,} tokens", total=tally.total)

        def advance(output: RequestOutput) -> None:
            tally.add(output)
            rate = tally.done / (bar.tasks[task].elapsed or 1e-9)
            told = f"{tally.done:,}/{tally.total:,} tokens, {rate:,.0f} a second"
            if len(requests) > 1:
                told += f", {tally.num_ended}/{len(requests)} requests"
            bar.update(task, total=tally.total, completed=tally.done, description=told)

        yield advance


class Tally:
    """How far requests are, in tokens of prompts and completions."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._most = {
            one.request_id: len(one.prompt_token_ids) + one.params.num_samples * one.params.max_tokens
            for one in requests
        }
        self._done = dict.fromkeys(self._most, 0)
        self.total = sum(self._most.values())  # falls where a request ends before its limit
        self.done = 0
        self.num_ended = 0

    def add(self, output: RequestOutput) -> None:
        """Take in how far a request has come."""
        name, done = output.request_id, _num_done(output)
        self.done += done - self._done[name]
        self._done[name] = done
        if output.is_finished:
            self.total -= self._most[name] - done
            self.num_ended += 1


def _num_done(output: RequestOutput) -> int:
    num_generated = sum(len(one.token_ids) for one in output.outputs)
    if num_generated or output.is_finished:
        return len(output.prompt_token_ids) + num_generated
    return 0 if output.prompt_logprobs is None else len(output.prompt_logprobs)


Prompt: TypeAlias = "str | Sequence[int]"
OnError: TypeAlias = Literal["raise", "return"]
ON_ERROR = ("raise", "return")


class LLM:
    """A model that generates and scores; see `EngineConfig` for the settings it takes as keywords.

    Raises:
        ModelError: the model cannot be had or used.
        UnknownParameterError: a setting of that name does not exist.
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        from logprobe.engine.backends.bridge import LoopThread
        from logprobe.engine.backends.start import start_native_engine

        self.config = EngineConfig(model=model, **settings)
        loaded = start_native_engine(self.config)
        self.engine = loaded.engine
        self.text = loaded.text
        self.processors = loaded.processors  # the instances by name, and what each has cost
        self._bridge = LoopThread()
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate from one prompt or many; outputs come in the order of the prompts.

        Args:
            prompts: texts or lists of token ids.
            params: one for all, or one a prompt; the default is `SamplingParams()`.
            progress: show a progress bar on stderr.
            on_error: `raise` a `BatchError` once all have ended if any failed, or `return` each failure
                as its output's `.error`.

        Raises:
            ParameterError: a prompt or parameter that can never be served; nothing was started then.
            BatchError: some requests failed; holds all outputs.
        """
        require(on_error in ON_ERROR, "on_error", f"must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        many = _as_prompts(prompts)
        asked = _as_params(params, len(many))
        requests = [self._request(prompt, one) for prompt, one in zip(many, asked, strict=True)]
        outputs = self._run(requests, progress=progress)
        for prompt, output in zip(many, outputs, strict=True):
            output.prompt = prompt if isinstance(prompt, str) else None
        return _checked(outputs, on_error)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate the next message of a conversation, laid out by the model's own chat template.

        Each output's `prompt` is the text that the template made.

        Raises:
            ParameterError: what `text.chat.lay_out` refuses, or as `generate` does.
            BatchError: the request failed.
        """
        prompt = lay_out(messages, self.text)
        ids = self.text.encode(prompt, add_special_tokens=False).tolist()
        outputs = self.generate(ids, params, progress=progress)
        for output in outputs:
            output.prompt = prompt
        return outputs

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a local folder; `SamplingParams(lora=name)` then runs on it.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
            ParameterError: the name is, or was, another adapter's.
        """
        self.engine.add_lora(name, path)

    def remove_lora(self, name: str) -> None:
        """Refuse new requests for an adapter; its name is not used again.

        Raises:
            ParameterError: no such adapter.
        """
        self.engine.remove_lora(name)

    def list_loras(self) -> dict[str, str]:
        """The loaded adapters: name → path."""
        return self.engine.list_loras()

    def score(
        self,
        pairs: Sequence[tuple[Prompt, Prompt]],
        *,
        progress: bool = False,
        lora: str | None = None,
        entropy: bool = False,
        unconditional: bool = False,
        logprobs: int = 0,
    ) -> list[Score]:
        """Score continuations after their contexts; a context that several share is computed once.

        Texts are split at the boundary as lm-evaluation-harness does (`TextEdge.encode_pair`).

        Args:
            pairs: (context, continuation), both texts or both lists of token ids.
            progress: show a progress bar on stderr.
            lora: the adapter to run on, by name.
            entropy: give the entropy at each token, too.
            unconditional: score each continuation after nothing (BOS or EOS), too, which gives `pmi`.
            logprobs: alternatives at each token, in the score's `record`; -1: the whole vocabulary.

        Raises:
            ParameterError: an empty continuation, or a pair that is too long; nothing was started then.
            BatchError: some requests failed.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=logprobs, entropy=entropy, lora=lora)
        split = [self._split_pair(pair) for pair in pairs]
        outputs = self._score_after(split, params, progress=progress)
        alone: Sequence[RequestOutput | None] = [None] * len(split)
        if unconditional:
            prefix = self.text.prefix()
            after_nothing = [(np.concatenate([prefix, ids[start:]]), len(prefix)) for ids, start in split]
            alone = self._score_after(after_nothing, params, progress=progress)
        starts = [start for _, start in split]
        return [self._score(*each) for each in zip(outputs, starts, alone, strict=True)]

    def perplexity(
        self,
        text: str | Iterable[str],
        *,
        stride: int | None = None,
        window: int | None = None,
        bos: bool | None = None,
        lora: str | None = None,
        progress: bool = False,
    ) -> Perplexity:
        """What the model gives a text of any length, each token scored once; see `scoring.perplexity`.

        Args:
            text: a text, or its parts one after the other (an open file), which are never held together.
            stride: tokens from one window to the next; the default is half a window.
            window: tokens a window; the default is the model's context.
            bos: put BOS (EOS where there is none) before the text, or do not; None: as the tokenizer does.
            lora: the adapter to run on, by name.
            progress: show a progress bar on stderr.

        Raises:
            ParameterError: a window or stride that cannot be used; a text that cannot be encoded.
            BatchError: a window failed.
        """
        num_bytes = len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else None
        with byte_bar(num_bytes, shown=progress) as advance:
            return perplexity(self, text, stride=stride, window=window, bos=bos, lora=lora, advance=advance)

    def close(self) -> None:
        """Let the model go; a second call does nothing."""
        self.engine.close()
        self._bridge.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt | IntArray, params: SamplingParams) -> Request:
        from logprobe.engine.request import Request
        from logprobe.text.edge import as_token_ids

        ids = self.text.encode(prompt) if isinstance(prompt, str) else as_token_ids(prompt)
        name = self._next_id()
        return Request(request_id=name, prompt_token_ids=ids, params=params)

    def _next_id(self) -> str:
        return f"request-{next(self._numbers)}"

    def _encode_pair(self, context: Prompt, continuation: Prompt) -> tuple[IntArray, int]:
        from logprobe.text.edge import as_token_ids

        if isinstance(context, str) and isinstance(continuation, str):
            return self.text.encode_pair(context, continuation)
        if isinstance(context, str) or isinstance(continuation, str):
            raise ParameterError("pairs", "context and continuation must both be texts or both be ids")
        before = as_token_ids(context) if len(context) else self.text.prefix()
        after = as_token_ids(continuation)
        require(len(after) > 0, "continuation", "is empty; there is nothing to score")
        return np.concatenate([before, after]), len(before)

    def _split_pair(self, pair: tuple[Prompt, Prompt]) -> tuple[IntArray, int]:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        require(is_pair, "pairs", f"must hold (context, continuation) pairs, got {pair!r:.60}")
        return self._encode_pair(*pair)

    def _score_after(
        self, split: Sequence[tuple[IntArray, int]], params: SamplingParams, *, progress: bool
    ) -> list[RequestOutput]:
        requests = [replace(self._request(ids, params), first_scored=start) for ids, start in split]
        return _checked(self._run(requests, progress=progress), "raise")

    def _score(self, output: RequestOutput, start: int, alone: RequestOutput | None) -> Score:
        record = output.prompt_logprobs
        assert record is not None
        ids = output.prompt_token_ids[start:]
        unconditional = None
        if alone is not None:
            assert alone.prompt_logprobs is not None
            unconditional = measures.total(alone.prompt_logprobs[-len(ids) :].chosen_entries().logprobs)
        data = self.text.vocabulary.bytes_of(ids)
        return Score.of(ids, record, data, unconditional_logprob=unconditional)

    def _run(self, requests: Sequence[Request], *, progress: bool) -> list[RequestOutput]:
        for request in requests:
            self.engine.check(request)
        with progress_bar(requests, shown=progress) as advance:
            return self._bridge.run(self._gather(requests, advance))

    async def _gather(
        self, requests: Sequence[Request], advance: Callable[[RequestOutput], None] | None
    ) -> list[RequestOutput]:
        async def follow(request: Request) -> RequestOutput:
            if advance is None:
                output = await self.engine.result(request.request_id)
            else:
                async for output in self.engine.stream(request.request_id):
                    advance(output)
            self._finish(output)
            return output

        self.engine.submit_many(requests)
        return await asyncio.gather(*map(follow, requests))

    def _finish(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            completion.text = self.text.text_of(completion.token_ids, completion.num_text_bytes)


def _checked(outputs: list[RequestOutput], on_error: OnError) -> list[RequestOutput]:
    errors: dict[int, LogprobeError] = {
        index: output.error for index, output in enumerate(outputs) if output.error is not None
    }
    if errors and on_error == "raise":
        raise BatchError(outputs, errors)
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
