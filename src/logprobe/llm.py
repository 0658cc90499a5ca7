"""`LLM`: the offline front door, many prompts at once.

The client with a bridge to callers without an event loop, and a progress bar.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from logprobe.analysis.progress import byte_bar, can_draw
from logprobe.analysis.spellings import MAX_ROWS
from logprobe.analysis.windows import perplexity
from logprobe.config import EngineConfig
from logprobe.errors import require
from logprobe.sampling import SamplingParams
from logprobe.text.chat import Layout

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    import torch
    from transformers import PreTrainedModel

    from logprobe.analysis.labels import Asked, Classification, Correction, Judgement, Labels
    from logprobe.analysis.members import FieldDistribution
    from logprobe.analysis.score import Score
    from logprobe.analysis.uncertainty import LowConfidence, Same, Uncertainty
    from logprobe.analysis.windows import Perplexity
    from logprobe.engine.client import OnError, Prompt
    from logprobe.engine.front import OnRunning
    from logprobe.engine.request import RequestOutput
    from logprobe.engine.truncation import Truncation
    from logprobe.next_token.lm import NextTokenLM
    from logprobe.next_token.rows import Row
    from logprobe.text.boundary import BoundaryRule, Split
    from logprobe.text.chat import Conversation, Conversations
    from logprobe.transport.messages import Request

ROW_CACHE_BYTES: Final = 1 << 26  # of the rows that fields take
AskedParams: TypeAlias = "SamplingParams | Sequence[SamplingParams] | None"


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
    if not can_draw(console):
        yield None
        return
    tally = Tally(requests)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"0/{tally.total:,} tokens", total=tally.total)

        def advance(output: RequestOutput) -> None:
            tally.add(output)
            rate = tally.done / (bar.tasks[task].elapsed or 1e-9)
            progress = f"{tally.done:,}/{tally.total:,} tokens, {rate:,.0f} a second"
            if len(requests) > 1:
                progress += f", {tally.num_ended}/{len(requests)} requests"
            bar.update(task, total=tally.total, completed=tally.done, description=progress)

        yield advance


class Tally:
    """How far requests are, in tokens of prompts and completions."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._most = {
            request.request_id: len(request.prompt_token_ids)
            + request.params.num_samples * request.params.max_tokens
            for request in requests
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
    num_generated = sum(len(completion.token_ids) for completion in output.outputs)
    if num_generated or output.is_finished:
        return len(output.prompt_token_ids) + num_generated
    return 0 if output.prompt_logprobs is None else len(output.prompt_logprobs)


def _one_of(params: AskedParams, sampling_params: AskedParams) -> AskedParams:
    is_one = params is None or sampling_params is None
    require(is_one, "sampling_params", "is another name for params; give one of the two")
    return sampling_params if params is None else params


class LLM:
    """A model that generates and scores; see `EngineConfig` for the settings it takes as keywords.

    Args:
        model: what `EngineConfig.model` may be, or a causal language model that transformers has loaded,
            which is copied in the `dtype` asked for and stays as it is.
        tokenizer: the fast tokenizer of a loaded model; a model by name brings its own.
        max_logprobs: most alternatives a token that a call may ask; -1 sets no cap.
        settings: the other fields of `EngineConfig`.

    Raises:
        ModelError: the model cannot be had or used.
        UnknownParameterError: a setting of that name does not exist.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel = "smollm2",
        *,
        tokenizer: Any = None,
        max_logprobs: int = -1,
        **settings: Any,
    ) -> None:
        from logprobe.analysis.client import ScoringClient
        from logprobe.engine.backends.bridge import LoopThread
        from logprobe.engine.backends.start import start_engine
        from logprobe.models.given import as_name, drop_copied_weights

        is_cap = isinstance(max_logprobs, int) and max_logprobs >= -1
        require(is_cap, "max_logprobs", "must be -1 (no cap), 0 or positive", got=max_logprobs)
        with ExitStack() as copied:
            name = copied.enter_context(as_name(model, tokenizer))
            self.config = EngineConfig(model=name, **settings)
            loaded = start_engine(self.config)
            # An engine process that is started again reads a given model's copy again.
            if loaded.engine.capabilities().num_processes == 0:
                drop_copied_weights(name)
            self._owned = copied.pop_all()
        self.loaded = loaded
        self.engine = loaded.engine
        self.text = loaded.text
        self.processors = loaded.processors  # the instances by name, and what each has cost, if run here
        self.client = ScoringClient(loaded.engine, loaded.text, max_logprobs=max_logprobs)
        self._bridge = LoopThread()
        self._owned.callback(self._bridge.close)
        self._owned.callback(self.engine.close)  # the first to close

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: AskedParams = None,
        *,
        sampling_params: AskedParams = None,
        progress: bool = False,
        on_error: OnError = "raise",
        truncation: Truncation = "error",
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Generate from one prompt or many; outputs come in the order of the prompts.

        Args:
            prompts: texts or lists of token ids.
            params: one for all, or one a prompt; the default is `SamplingParams()`.
            sampling_params: `params` by its longer name; give one of them.
            progress: show a progress bar on stderr.
            on_error: `raise` a `BatchError` once all have ended if any failed, or `return` each failure,
                also of a prompt that can never be served, as its output's `.error`.
            truncation: a prompt longer than what fits is an `error`, or loses its `left` end, or is read in
                sliding `window`s: its numbers are those of every token, and the text goes on from its end.
            add_special_tokens: whether the tokenizer adds its special tokens (BOS) to texts; False for a text
                that holds them, such as one that a chat template made.

        Raises:
            ParameterError: a prompt or parameter that can never be served, by its number; nothing was
                started then.
            BatchError: some requests failed; holds all outputs.
        """
        watch = partial(progress_bar, shown=progress)
        asked = _one_of(params, sampling_params)
        work = self.client.generate(
            prompts,
            asked,
            watch=watch,
            on_error=on_error,
            truncation=truncation,
            add_special_tokens=add_special_tokens,
        )
        return self._bridge.run(work)

    def chat(
        self,
        messages: Conversations,
        params: AskedParams = None,
        *,
        sampling_params: AskedParams = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate the next message of each conversation, laid out by the model's own chat template.

        Each output's `prompt` is the text that the template made.

        Args:
            messages: one conversation (a list of messages with role and content), many, or what one user
                says: a text, or a list of content parts.
            params: one for all, or one a conversation; the default is `SamplingParams()`.
            sampling_params: `params` by its longer name; give one of them.
            tools: what the model may call, as OpenAI describes it; where the template takes none, a text says
                them (docs/channels.md). Calls come as text, as the model writes them.
            add_generation_prompt: end where the assistant's turn begins; the default, unless:
            continue_final_message: go on with the last message, whose text the output does not repeat.
            chat_template_kwargs: variables of the model's own template, such as `enable_thinking`.
            progress: show a progress bar on stderr.
            on_error: as in `generate`.

        Raises:
            ParameterError: what `text.chat.lay_out` refuses, or as `generate` does.
            BatchError: some requests failed; holds all outputs.
        """
        watch, asked = partial(progress_bar, shown=progress), _one_of(params, sampling_params)
        layout = Layout(
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        work = self.client.chat(messages, asked, layout=layout, watch=watch, on_error=on_error)
        return self._bridge.run(work)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, add_special_tokens: bool = True
    ) -> Generator[RequestOutput]:
        """Generate from one prompt and give its one output each time it has grown.

        The text holds whole characters alone, and nothing that may still become a stop string. Leaving the
        loop early gives the request up. `add_special_tokens` is as in `generate`.

        Raises:
            ParameterError: a prompt or parameter that can never be served.
            EngineError: how the request failed.
        """
        return self._bridge.iterate(self.client.stream(prompt, params, add_special_tokens=add_special_tokens))

    def stream_async(
        self, prompt: Prompt, params: SamplingParams | None = None, *, add_special_tokens: bool = True
    ) -> AsyncGenerator[RequestOutput]:
        """`stream` for callers in an event loop: `async for output in llm.stream_async(prompt)`."""
        return self.client.stream(prompt, params, add_special_tokens=add_special_tokens)

    def load_weights(
        self,
        weights: str | Path | Mapping[str, torch.Tensor],
        *,
        version: str | None = None,
        on_running: OnRunning = "finish",
    ) -> str:
        """Go on with other weights of the same model, as a trainer makes them; returns once they answer.

        What is returned is their version, as records of theirs have it in `info.weight_version`.

        Every cache is dropped, LoRA weights are kept, and no request sees numbers of both. Until the old
        weights go, both are in memory. Loads take turns.

        Args:
            weights: a `state_dict()`, of tensors or NumPy's arrays, which is copied, or a folder of
                safetensors files. What DDP, FSDP, torch.compile and a merged PEFT model put before names
                is left out.
            version: what records call these weights, such as `step-1200`; None: a digest of them
                (`models.loading.digest_of`), for which every byte is read once more.
            on_running: requests that run `finish` on the old weights while new ones wait, or `end` with
                `WeightsReplacedError`, as does one whose reader lags in either case.

        Raises:
            ModelError: the weights cannot be read, or do not fit the model; the old ones go on.
            ParameterError: the engine is not the native one, a version that no record can hold, weights of
                another type, or LoRA weights beside those that they change.
        """
        from logprobe.engine.front import check_on_running

        return self.engine.load_weights(weights, version=version, finishes=check_on_running(on_running))

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load LoRA weights from a folder; `with_lora(name)` and `SamplingParams(lora=name)` run on them.

        A name that is loaded again stands for the new weights; what was asked before keeps its own.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
        """
        self.engine.add_lora(name, path)

    def add_new_lora(self, path: str | Path, name: str = "lora_1") -> None:
        """`add_lora` in genlm-backend's order of words."""
        self.add_lora(name, path)

    def remove_lora(self, name: str) -> None:
        """Refuse new requests for LoRA weights; what runs on them ends as it would have.

        Raises:
            ParameterError: no such weights.
        """
        self.engine.remove_lora(name)

    def list_loras(self) -> dict[str, str]:
        """The loaded LoRA weights: name → path."""
        return self.engine.list_loras()

    def with_lora(self, name: str | None) -> Self:
        """The same model, on which every call runs on these LoRA weights.

        It shares the engine and owns nothing: its `close` does nothing, and it ends with the model that was
        loaded. Weights loaded again under the name answer its later calls.

        Args:
            name: of loaded weights, which the parameters of its calls need not name, and no others may be
                named; None: the model as it was loaded, whose calls run on what their parameters name.

        Raises:
            ParameterError: no such weights.
        """
        from logprobe.analysis.client import ScoringClient

        is_name = name is None or isinstance(name, str)
        require(is_name, "lora", f"must be the name of LoRA weights or None, got {name!r}")
        if name is not None:
            self.engine.lora_number(name)
        view = copy(self)
        view.client = ScoringClient(self.engine, self.text, lora=name, max_logprobs=self.client.max_logprobs)
        view._owned = ExitStack()  # noqa: SLF001 - of the same class
        return view

    @property
    def lora(self) -> str | None:
        """The LoRA weights of `with_lora`; None: those that a call's parameters name."""
        return self.client.lora

    def score(
        self,
        pairs: Sequence[tuple[Prompt, Prompt] | Split],
        *,
        progress: bool = False,
        entropy: bool = False,
        varentropy: bool = False,
        margin: bool = False,
        unconditional: bool = False,
        logprobs: int = 0,
        token_ids: Sequence[Any] | None = None,
        temperature: float | None = None,
        sampling: SamplingParams | None = None,
        on_error: OnError = "raise",
        truncation: Truncation = "error",
        boundary: BoundaryRule = "auto",
    ) -> list[Score]:
        """Score continuations after their contexts; a context that several share is computed once.

        Two texts are the tokens of the joined text; white space that ends the context counts to the
        continuation, and an empty context becomes the model's BOS (or EOS). Where a token spans the end of
        the context, the continuation's bytes are summed over their tokenizations (docs/scoring.md); the
        score's `boundary` is then `bytes`, else `token`.

        Args:
            pairs: (context, continuation), both texts or both lists of token ids.
            progress: show a progress bar on stderr.
            entropy: give the entropy at each token, too.
            varentropy: give the variance of the surprisal at each token, too.
            margin: give the nats between the two likeliest tokens at each, too.
            unconditional: score each continuation after nothing (BOS or EOS), too, which gives `pmi`.
            logprobs: alternatives at each token, in the score's `record`; -1: the whole vocabulary.
            token_ids: for each pair the ids whose numbers are wanted beside: at every token of the
                continuation, or a list of lists, those of each token, any number each. `record.given` has
                their logprobs and true ranks. None: none.
            temperature: score the model's own distribution at this temperature; `record.info` tells it.
            sampling: score under the distribution that these would draw from (temperature, truncation,
                processors), token by token: *processed* numbers, -inf for a token that could not be drawn.
                The record holds `log_kept_mass`. None: the model's own distribution.
            on_error: `raise` a `BatchError` once all have ended if any failed, or `return` each failure, also
                of a pair that can never be scored, as its score's `.error`.
            truncation: a pair longer than what fits is an `error`, or its context loses its `left` end, or it
                is scored in sliding `window`s (without a `record`).
            boundary: `auto`, or `token` to split texts as lm-evaluation-harness does where a token spans the
                end of the context: the continuation has what the number of the context's tokens leaves.

        Raises:
            ParameterError: an empty continuation, a context whose first token spans its end, or a pair that
                is too long, by its number; nothing was started then.
            BatchError: some pairs failed; holds all scores.
        """
        columns: dict[str, Any] = {"entropy": entropy, "varentropy": varentropy, "margin": margin}
        params = SamplingParams(max_tokens=0, prompt_logprobs=logprobs, **columns)
        if temperature is not None:
            from logprobe.analysis.score_requests import at_temperature

            require(sampling is None, "temperature", "is also a field of sampling; give it there alone")
            sampling = at_temperature(temperature)
        watch = partial(progress_bar, shown=progress)
        work = self.client.score(
            pairs,
            params,
            watch=watch,
            sampling=sampling,
            unconditional=unconditional,
            on_error=on_error,
            truncation=truncation,
            token_ids=token_ids,
            boundary=boundary,
        )
        return self._bridge.run(work)

    def classify(
        self,
        prompts: Asked | Sequence[Asked],
        labels: Labels,
        *,
        correction: Correction = "none",
        content_free: Asked | None = None,
        progress: bool = False,
    ) -> Classification | list[Classification]:
        """How likely each label is as the answer, whole: one classification a prompt.

        What a prompt's labels share is computed once. Probabilities come as they are (`logprobs`, `mass`),
        and as shares of all labels (`probabilities`).

        Args:
            prompts: a text that the label goes on with (give it its space), a conversation that it answers
                by the model's chat template, or a list of these.
            labels: texts, or name → text or texts that mean it, whose probabilities are added up; of any
                number of tokens, each in its usual spelling.
            correction: what shares are made of: `none`, the probabilities themselves; `length`, their
                geometric mean a token (Brown et al. 2020); `calibrated`, their ratio to those after a prompt
                without content (Zhao et al. 2021).
            content_free: that prompt; the default is the text `N/A`. Lay it out as the others are.
            progress: show a progress bar on stderr.

        Raises:
            ParameterError: labels that are equal, empty, or begin another; a prompt that is too long; a
                `content_free` that no correction asks for.
            BatchError: some requests failed.
        """
        from logprobe.analysis.labels import classify

        return classify(
            self, prompts, labels, correction=correction, content_free=content_free, progress=progress
        )

    def rerank(
        self, query: str, documents: Sequence[str], *, progress: bool = False, **layout: Any
    ) -> list[float]:
        """How relevant each document is to a query, in [0, 1], by a model that answers yes or no.

        P(yes) / (P(yes) + P(no)) after the layout of Qwen3-Reranker; `analysis.labels.rerank` has its parts
        (`task`, `template`, `labels`) for other models.

        Raises:
            ParameterError: no list of texts, a part of the layout that cannot be used, or a document that
                is too long, by its number.
            BatchError: some requests failed.
        """
        from logprobe.analysis.labels import rerank

        return rerank(self, query, documents, progress=progress, **layout)

    def judge(
        self,
        prompts: Asked | Sequence[Asked],
        scale: Sequence[float] = range(1, 6),
        *,
        progress: bool = False,
    ) -> Judgement | list[Judgement]:
        """The distribution of the grade that a prompt or a conversation asks for: mean, spread, rest.

        An answer is the longest grade that it spells: of 1 to 10, what begins with 1 and goes on to 10 is a
        10, whether the tokenizer has a token of its own for 10 or writes it as those of 1 and 0.

        Args:
            prompts: as in `classify`.
            scale: the grades, two numbers or more; each is looked for as it is usually written (7, 2.5).
            progress: show a progress bar on stderr.

        Raises:
            ParameterError: a scale of one grade, of equal ones, or of what is no number of up to six digits.
            BatchError: some requests failed.
        """
        from logprobe.analysis.labels import judge

        return judge(self, prompts, scale, progress=progress)

    def fields(
        self,
        output: RequestOutput,
        schema: dict[str, Any] | None = None,
        *,
        index: int = 0,
        max_rows: int = MAX_ROWS,
    ) -> list[FieldDistribution]:
        """How sure each value of a JSON reply is, and how likely each other value that its schema names.

        Where the schema names what may stand at a place (an enum, a const, a boolean, integers between two
        bounds, a union of such), `members` has the probability of each, summed over all its spellings, and
        `grammar_members` the same under the request's grammar. That takes forward passes, each a token
        longer than what is known.

        Args:
            output: what a call gave that asked for `logprobs`.
            schema: the JSON schema of the reply; None: that of the request's `response_format`.
            index: which of its completions.
            max_rows: next-token rows that the members of one value may take; where they are too few,
                `unresolved` says how much probability was not followed.

        Raises:
            ParameterError: no log-probabilities of the model's own distribution; a text that is no JSON; no
                schema, one that names no values, or one that cannot be followed; replaced weights.
            EngineError: the engine failed, was closed, or got other weights meanwhile.
        """
        return self._bridge.run(self._rows.fields(output, schema, index=index, max_rows=max_rows))

    @cached_property
    def _rows(self) -> NextTokenLM[Row]:
        """Next-token rows of the same engine, where something asks for them."""
        from logprobe.next_token.lm import NextTokenLM
        from logprobe.next_token.rows import RowCache
        from logprobe.next_token.source import EngineRows

        rows: NextTokenLM[Row] = NextTokenLM(
            EngineRows(self.loaded),
            self.text,
            as_caller=lambda rows: rows,
            cache=RowCache(ROW_CACHE_BYTES),
            batch_size=1,
            timeout=0,
            owns_source=False,
        )
        self._owned.callback(rows.cleanup)  # before the engine
        return rows

    def uncertainty(
        self,
        prompt: Prompt | Conversation,
        n: int = 10,
        params: SamplingParams | None = None,
        *,
        same: Same | None = None,
        stop_when: LowConfidence | None = None,
        window: int | None = None,
        k: int | None = None,
        self_certainty: bool = False,
        progress: bool = False,
    ) -> Uncertainty:
        """Draw answers, and say by them and their exact probabilities how sure the model is.

        Args:
            prompt: a text that answers go on with, token ids, or a conversation that they answer by the
                model's chat template.
            n: answers to draw; what they share is computed once.
            params: how each is drawn, and how long it may be; the default is `SamplingParams()`. With a
                `seed` they are the same each time, and the first is the one of `generate`. What is reported
                is set here.
            same: whether two texts mean the same; the default: they are equal but for white space around.
            stop_when: ends an answer that the model is not sure of; it counts in no figure then.
            window: tokens of a group whose confidence is averaged; the default is `stop_when`'s, or 2,048.
            k: the likeliest tokens that make the confidence of one; the default is `stop_when`'s, or 20.
            self_certainty: give each answer's, too, for which it is scored once more with whole rows.
            progress: show a progress bar on stderr.

        Raises:
            ParameterError: no answers, or several at temperature 0; a prompt, a parameter or a `same` that
                cannot be used.
            BatchError: some answers failed.
            WeightsReplacedError: other weights took over amid the answers.
        """
        from logprobe.analysis.uncertainty import draw_plan

        plan = draw_plan(n, params, stop_when=stop_when, window=window, k=k, self_certainty=self_certainty)
        work = self.client.draw(prompt, plan, watch=partial(progress_bar, shown=progress))
        return plan.sum_up(self._bridge.run(work), same)

    def perplexity(
        self,
        text: str | Iterable[str],
        *,
        stride: int | None = None,
        window: int | None = None,
        bos: bool | None = None,
        progress: bool = False,
    ) -> Perplexity:
        """What the model gives a text of any length, each token scored once; see `analysis.perplexity`.

        Args:
            text: a text, or its parts one after the other (an open file), which are never held together.
            stride: tokens from one window to the next; the default is half a window, and a whole one makes
                them disjoint, the first token of each without a number.
            window: tokens a window; the default is the model's context.
            bos: put BOS (EOS where there is none) before the text, or do not; None: as the tokenizer does.
            progress: show a progress bar on stderr.

        Raises:
            ParameterError: a window or stride that cannot be used; a text that cannot be encoded.
            BatchError: a window failed.
        """
        num_bytes = len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else None
        with byte_bar(num_bytes, shown=progress) as advance:
            return perplexity(self, text, stride=stride, window=window, bos=bos, advance=advance)

    def get_tokenizer(self) -> Any:
        """The model's own tokenizer, as transformers has it; loaded when first asked for."""
        return self.text.tokenizer

    def close(self) -> None:
        """Let the model go; a second call does nothing, nor does a view's (`with_lora`)."""
        self._owned.close()

    def cleanup(self) -> None:
        """`close`, by the name that `AsyncLM` has for it."""
        self.close()

    def __repr__(self) -> str:
        facts = self.engine.capabilities()
        lora = "" if self.lora is None else f", lora={self.lora!r}"
        return f"LLM({self.config.model!r}, {facts.engine}, {facts.device}, {facts.dtype}{lora})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
