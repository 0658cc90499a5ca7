"""`Model`: the methods of `LLM` and `AsyncLLM`, each written once as a coroutine (see `calls`)."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, aclosing
from copy import copy
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, TypeVar

from logprobe.analysis.labels import RERANK_TASK, RERANK_TEMPLATE, YES_NO
from logprobe.analysis.progress import byte_bar, progress_bar
from logprobe.analysis.spellings import MAX_ROWS
from logprobe.calls import Waiter, coroutine_method, generator_method
from logprobe.config import EngineConfig
from logprobe.errors import require
from logprobe.text.chat import Layout

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Unpack

    import torch
    from transformers import PreTrainedModel

    from logprobe.analysis.classification import Classification
    from logprobe.analysis.confidence import FittedConfidence
    from logprobe.analysis.labels import Asked, Correction, Judgement, Labels, Plan
    from logprobe.analysis.lens import LogitLens
    from logprobe.analysis.members import FieldDistribution
    from logprobe.analysis.pairs import MinimalPairs
    from logprobe.analysis.score import Score
    from logprobe.analysis.scorer import Scorer
    from logprobe.analysis.texts import Boundary, NatsOrBits, ScoredText
    from logprobe.analysis.uncertainty import LowConfidence, Same, Uncertainty
    from logprobe.analysis.windows import Perplexity
    from logprobe.config import EngineSettings
    from logprobe.engine.client import OnError
    from logprobe.engine.front import Front, OnRunning
    from logprobe.engine.request import RequestOutput
    from logprobe.engine.truncation import Truncation
    from logprobe.next_token.engine_lm import EngineLM
    from logprobe.next_token.fields import SpellingTools
    from logprobe.next_token.rows import Row
    from logprobe.processors import Pipeline
    from logprobe.sampling import SamplingParams
    from logprobe.text.boundary import BoundaryRule, Split
    from logprobe.text.chat import Conversation, Conversations
    from logprobe.text.edge import TextEdge
    from logprobe.text.prompts import Prompt

ROW_CACHE_BYTES: Final = 1 << 26  # cache of next-token rows for `LLM.field_distributions`
T = TypeVar("T")
AskedParams: TypeAlias = "SamplingParams | Sequence[SamplingParams] | None"


class Model:
    """A model that generates and scores; the base class of `LLM` and `AsyncLLM`.

    A method calls another one as `Model.score(self, ...)`, which is the coroutine in either class.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel = "smollm2",
        *,
        tokenizer: Any = None,
        max_logprobs: int = -1,
        **settings: Unpack[EngineSettings],
    ) -> None:
        from logprobe.analysis.client import ScoringClient
        from logprobe.engine.backends.start import start_engine
        from logprobe.models.given import as_name, drop_copied_weights

        is_cap = isinstance(max_logprobs, int) and max_logprobs >= -1
        require(is_cap, "max_logprobs", "must be >= -1 (-1: no limit)", got=max_logprobs)
        with ExitStack() as copied:
            name = copied.enter_context(as_name(model, tokenizer))
            self.config = EngineConfig(model=name, **settings)
            loaded = start_engine(self.config)
            # Engine processes read the copy again if they are restarted.
            if loaded.engine.capabilities().num_processes == 0:
                drop_copied_weights(name)
            self._owned = copied.pop_all()
        self.engine: Front = loaded.engine
        self.text: TextEdge = loaded.text
        self.processors: Pipeline | None = loaded.processors
        self._loaded = loaded
        self._client = ScoringClient(loaded.engine, loaded.text, max_logprobs=max_logprobs)
        self._open()
        self._owned.callback(self.engine.close)  # closed first

    def _open(self) -> None:
        """Create what a subclass needs; `_owned` closes it."""

    @coroutine_method
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: AskedParams = None,
        *,
        progress: bool = False,
        on_error: OnError = "raise",
        truncation: Truncation = "error",
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Generate completions for one or more prompts; outputs are in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a dict as in vLLM (`{"prompt": ...}` or
                `{"prompt_token_ids": ...}`); or a list of several.
            sampling_params: sampling parameters for all prompts, or a list with one per prompt; the default
                is `SamplingParams()`.
            progress: show a progress bar on stderr.
            on_error: "raise" raises a `BatchError` if any request failed, after all requests have ended.
                "return" instead sets `.error` on the output of each failed request or invalid prompt.
            truncation: what to do with a prompt that is too long: "error" raises an error, "left" drops
                tokens from the beginning, and "window" processes the prompt in sliding windows, with logprobs
                for all prompt tokens and a completion that continues the end of the prompt.
            add_special_tokens: whether the tokenizer adds its special tokens (BOS) to texts; use False for
                texts that already contain special tokens, such as rendered chat templates.

        Raises:
            ParameterError: a prompt or parameter is invalid; the error names its index, and no request was
                started.
            BatchError: some requests failed; the error holds all outputs.
        """
        return await self._client.generate(
            prompts,
            sampling_params,
            watch=partial(progress_bar, shown=progress),
            on_error=on_error,
            truncation=truncation,
            add_special_tokens=add_special_tokens,
        )

    @coroutine_method
    async def chat(
        self,
        messages: Conversations,
        sampling_params: AskedParams = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate the next message of each conversation, using the model's chat template.

        Each output's `prompt` is the rendered template.

        Args:
            messages: a conversation (a list of messages with role and content), a list of conversations, or
                the content of a single user message (a text or a list of content parts).
            sampling_params: sampling parameters for all conversations, or a list with one per conversation;
                the default is `SamplingParams()`.
            tools: functions that the model may call, in OpenAI's format. If the template does not support
                tools, they are described in text (docs/channels.md). The output's text contains the calls as
                the model wrote them.
            add_generation_prompt: append the start of the assistant's turn; the default is True unless
                `continue_final_message` is set.
            continue_final_message: continue the last message, whose text is not repeated in the output.
            chat_template_kwargs: variables for the chat template, such as `enable_thinking`.
            progress: show a progress bar on stderr.
            on_error: see `generate`.

        Raises:
            ParameterError: messages are invalid (see `text.chat.lay_out`), or one of the reasons in
                `generate`.
            BatchError: some requests failed; the error holds all outputs.
        """
        layout = Layout(
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return await self._client.chat(
            messages,
            sampling_params,
            layout=layout,
            watch=partial(progress_bar, shown=progress),
            on_error=on_error,
        )

    @generator_method
    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput]:
        """Generate from one prompt, and yield the output so far each time it has grown.

        The output's text has only whole characters, and ends before any characters that may be the start of a
        stop string. Leaving the loop early aborts the request. For `add_special_tokens` see `generate`.

        Raises:
            ParameterError: the prompt or a parameter is invalid.
            EngineError: the request failed.
        """
        outputs = self._client.stream(prompt, sampling_params, add_special_tokens=add_special_tokens)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    @coroutine_method
    async def load_weights(
        self,
        weights: str | Path | Mapping[str, torch.Tensor],
        *,
        version: str | None = None,
        on_running: OnRunning = "finish",
    ) -> str:
        """Replace the model's weights, for example after a training step, and return their version.

        The call returns once the new weights are in use; records computed with them have the version as
        `info.weight_version`. All caches are dropped, and LoRA adapters are kept. No request mixes old and
        new weights. Both are in memory until the old weights are freed. Concurrent loads run one after
        another.

        Args:
            weights: a `state_dict()` of tensors or NumPy arrays, which is copied, or a folder of safetensors
                files. Name prefixes of DDP, FSDP, torch.compile and merged PEFT models are removed.
            version: name of the new weights in records, such as `step-1200`. None uses a digest of the
                weights (`models.loading.digest_of`), for which every byte is read once more.
            on_running: with "finish", running requests finish on the old weights while new requests wait;
                with "end", they end with `WeightsReplacedError`. In both cases, a stream whose reader lags
                behind ends with that error.

        Raises:
            ModelError: the weights cannot be read or do not fit the model; the old weights stay in use.
            ParameterError: the engine is not the native one, the version is invalid, or `weights` has an
                unsupported type or belongs to an unmerged PEFT model.
        """
        from logprobe.engine.front import check_on_running

        finishes = check_on_running(on_running)
        return await asyncio.to_thread(self.engine.load_weights, weights, version=version, finishes=finishes)

    @coroutine_method
    async def add_lora(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a folder, for `with_lora(name)` and `SamplingParams(lora=name)`.

        Loading a name again replaces the adapter for new requests; earlier requests keep the old adapter.

        Raises:
            ModelError: the adapter cannot be read or does not fit the model.
            ParameterError: the name is empty, or the engine does not support LoRA.
            EngineError: an engine process exited during the load, or the engine was closed.
        """
        await asyncio.to_thread(self.engine.add_lora, name, path)

    @coroutine_method
    async def remove_lora(self, name: str) -> None:
        """Unregister a LoRA adapter: new requests for it are rejected, and running requests finish.

        Raises:
            ParameterError: no adapter has this name.
        """
        await asyncio.to_thread(self.engine.remove_lora, name)

    def list_loras(self) -> dict[str, str]:
        """Return the path of each loaded LoRA adapter, by name."""
        return self.engine.list_loras()

    def with_lora(self, name: str | None) -> Self:
        """Return a view of the model on which every call uses this LoRA adapter.

        The view shares the engine: closing the view does nothing, and the view is unusable once the original
        model is closed. If the adapter is loaded again under the same name, later calls use the new adapter.

        Args:
            name: name of a loaded adapter. The parameters of a call need not name the adapter, and must not
                name another one. With None, each call uses the adapter that its parameters name, if any.

        Raises:
            ParameterError: no adapter has this name.
        """
        from logprobe.analysis.client import ScoringClient

        is_name = name is None or isinstance(name, str)
        require(is_name, "lora", f"must be the name of a LoRA adapter or None, got {name!r}")
        if name is not None:
            self.engine.lora_number(name)
        view = copy(self)
        view._client = ScoringClient(  # noqa: SLF001 - same class
            self.engine, self.text, lora=name, max_logprobs=self._client.max_logprobs
        )
        view._owned = ExitStack()  # noqa: SLF001 - same class
        return view

    @property
    def lora(self) -> str | None:
        """Name of the LoRA adapter of a `with_lora` view; None if each call's parameters decide."""
        return self._client.lora

    @coroutine_method
    async def score(
        self,
        pairs: Iterable[tuple[Prompt, Prompt] | Split],
        *,
        progress: bool = False,
        entropy: bool = False,
        varentropy: bool = False,
        margin: bool = False,
        unconditional: bool = False,
        logprobs: int = 0,
        logprob_token_ids: Iterable[Any] | None = None,
        temperature: float | None = None,
        sampling_params: SamplingParams | None = None,
        on_error: OnError = "raise",
        truncation: Truncation = "error",
        boundary: BoundaryRule = "auto",
    ) -> list[Score]:
        """Score continuations given their contexts; a context shared by several pairs is computed once.

        For texts, the joined text is tokenized. Whitespace at the end of the context is scored with the
        continuation, and an empty context is replaced with BOS (or EOS). If a token spans the end of the
        context, the probability of the continuation's bytes is summed over all their tokenizations
        (docs/scoring.md), and the score's `boundary` is "bytes" instead of "token".

        Args:
            pairs: (context, continuation) pairs, both texts or both lists of token ids; see `generate` for
                the forms of a prompt.
            progress: show a progress bar on stderr.
            entropy: also report the entropy at each token, in nats.
            varentropy: also report the variance of the surprisal at each token, in nats squared.
            margin: also report the difference between the two highest logprobs at each token, in nats.
            unconditional: also score each continuation without its context (after BOS or EOS), for `pmi`.
            logprobs: number of alternatives per token in the score's `record`; -1 means the whole vocabulary.
            logprob_token_ids: for each pair, further ids whose logprobs and exact ranks are reported in
                `record.given`: one list of ids that applies to all tokens in the continuation, or a list of
                ids per token.
            temperature: score under the model's distribution at this temperature, which `record.info` states.
            sampling_params: score under the distribution that these parameters would sample from
                (temperature, truncation, processors). A token that cannot be sampled has a logprob of -inf,
                and the record has `log_kept_mass`. None scores under the model's own distribution.
            on_error: "raise" raises a `BatchError` if any pair failed, after all requests have ended.
                "return" instead sets `.error` on the score of each failed or invalid pair.
            truncation: what to do with a pair that is too long: "error" raises an error, "left" drops tokens
                from the beginning of the context, and "window" scores the pair in sliding windows, without a
                `record`.
            boundary: "auto" as described above, or "token" to split as lm-evaluation-harness does: if the
                context alone has n tokens, the continuation is everything after the first n tokens of the
                joined text.

        Raises:
            ParameterError: a continuation is empty, a context ends within the first token of the joined text,
                or a pair is too long; the error names the index, and no request was started.
            BatchError: some pairs failed; the error holds all scores.
        """
        params = self._client.scoring_params(logprobs, entropy=entropy, varentropy=varentropy, margin=margin)
        if temperature is not None:
            from logprobe.analysis.score_requests import at_temperature

            remedy = "cannot be combined with sampling_params; set the temperature there"
            require(sampling_params is None, "temperature", remedy)
            sampling_params = at_temperature(temperature)
        return await self._client.score(
            pairs,
            params,
            watch=partial(progress_bar, shown=progress),
            sampling=sampling_params,
            unconditional=unconditional,
            on_error=on_error,
            truncation=truncation,
            logprob_token_ids=logprob_token_ids,
            boundary=boundary,
        )

    @coroutine_method
    async def classify(
        self,
        prompts: Asked | Sequence[Asked],
        labels: Labels,
        *,
        correction: Correction = "none",
        content_free: Asked | None = None,
        confidence: FittedConfidence | None = None,
        progress: bool = False,
    ) -> list[Classification]:
        """Return the probability that the answer begins with each label, with one classification per prompt.

        A prompt is computed once for all of its labels. Results have the labels' probabilities (`logprobs`,
        `mass`) and the probabilities normalized to sum to one (`probabilities`).

        Args:
            prompts: a prompt (see `generate`) that the label continues (the label includes the space), a
                conversation that the label answers using the model's chat template, or a list of several.
            labels: texts, or a mapping from a name to a text or to several texts with the same meaning, whose
                probabilities are summed. Texts may have any number of tokens; each text is scored in its
                usual tokenization.
            correction: what to normalize: "none" takes the labels' probabilities, "length" their geometric
                mean per token (Brown et al. 2020), and "calibrated" their ratio to the probabilities after a
                content-free prompt (Zhao et al. 2021).
            content_free: the content-free prompt, in the same format as the prompts; the default is `N/A`.
            confidence: a fit by `logprobe.analysis.calibrate` to results of the same model, prompt template,
                labels and `correction`; results then have `confidence`, the probabilities and set of labels
                under this fit.
            progress: show a progress bar on stderr.

        Raises:
            ParameterError: a label is empty, equals another label or is a prefix of one; a prompt is too
                long; or `content_free` is given without `correction="calibrated"`.
            BatchError: some requests failed.
        """
        from logprobe.analysis.labels import classify_plan

        return await self._run_plan(
            partial(
                classify_plan,
                self.text,
                prompts,
                labels,
                correction=correction,
                content_free=content_free,
                confidence=confidence,
            ),
            progress=progress,
        )

    @coroutine_method
    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        task: str = RERANK_TASK,
        template: Sequence[str] = RERANK_TEMPLATE,
        labels: Sequence[str] = YES_NO,
        progress: bool = False,
    ) -> list[float]:
        """Return the relevance of each document to a query, in [0, 1], from a model that answers yes or no.

        The relevance is P(yes) / (P(yes) + P(no)) with the prompt format of Qwen3-Reranker. For other models
        pass `task`, `template` or `labels`.

        Args:
            query: the search query.
            documents: texts.
            task: instruction that describes what makes a document relevant.
            template: three texts: one before the query and document, one with them, and one after them. The
                second text must contain `{query}` and `{document}` once each, and may contain `{task}` once.
            labels: the answers for a relevant and for an irrelevant document.
            progress: show a progress bar on stderr.

        Raises:
            ParameterError: `documents` is not a list of texts, `task`, `template` or `labels` is invalid, or
                a document is too long, in which case the error names its index.
            BatchError: some requests failed.
        """
        from logprobe.analysis.labels import rerank_plan

        plan = partial(rerank_plan, self.text, query, documents, task=task, template=template, labels=labels)
        return await self._run_plan(plan, progress=progress)

    @coroutine_method
    async def judge(
        self,
        prompts: Asked | Sequence[Asked],
        scale: Sequence[float] = range(1, 6),
        *,
        progress: bool = False,
    ) -> list[Judgement]:
        """Return the probability of each grade as the answer, with one judgment per prompt or conversation.

        An answer counts as the longest grade that it starts with: with grades 1 to 10, "10" counts as 10 and
        not as 1, whether the tokenizer has a token for 10 or splits it into 1 and 0.

        Args:
            prompts: see `classify`.
            scale: two or more numbers, scored in their usual spelling (7, 2.5).
            progress: show a progress bar on stderr.

        Raises:
            ParameterError: the scale has fewer than two grades, equal grades, or a grade that is not a number
                of up to six digits.
            BatchError: some requests failed.
        """
        from logprobe.analysis.labels import judge_plan

        return await self._run_plan(partial(judge_plan, self.text, prompts, scale), progress=progress)

    @coroutine_method
    async def logit_lens(
        self,
        text: Prompt,
        layers: Sequence[int] | Literal["last"] | None = None,
        *,
        logprobs: int = 5,
        add_special_tokens: bool = True,
    ) -> LogitLens:
        """Return what each layer of the model would predict after each token of a text (logit lens).

        A layer's prediction is the model's output head applied to the model's final norm of the layer's
        hidden state. For the last layer, this is the model's own prediction.

        Args:
            text: a text or token ids; see `generate` for the forms of a prompt.
            layers: numbers as in `SamplingParams.return_hidden_states`: 0 is the embedding, n the output of
                layer n, and negative numbers count from the end; or `last`. None: all.
            logprobs: number of most likely tokens per layer and position; -1 means the whole vocabulary.
            add_special_tokens: see `generate`.

        Raises:
            ParameterError: `layers` is empty or names a layer that does not exist, the text is too long, or
                the engine does not report hidden states.
            BatchError: the request failed, for example because the model has no separate final norm.
        """
        from logprobe.analysis.lens import LogitLens
        from logprobe.engine.plan.capture import layers_of
        from logprobe.sampling.params import layer_numbers
        from logprobe.transport.messages import Lens

        shape = self.engine.capabilities().shape
        require(
            shape is not None, "layers", "this engine does not report hidden states; use the native engine"
        )
        assert shape is not None
        named = range(shape.num_layers + 1) if layers is None else layer_numbers("layers", layers)
        asked = layers_of(named, shape, "layers")
        lens = Lens(asked, logprobs)
        output = await self._client.lens(text, lens, add_special_tokens=add_special_tokens)
        return LogitLens.of(output, asked, self.text.vocabulary)

    async def _run_plan(self, lay_out: Callable[[], Plan[T]], *, progress: bool) -> T:
        """Lay out prompts on a worker thread, because tokenizing many texts is slow, and score them."""
        plan = await asyncio.to_thread(lay_out)
        scores = await Model.score(self, plan.pairs, progress=progress)
        return plan.sum_up(scores)

    @coroutine_method
    async def field_distributions(
        self,
        output: RequestOutput,
        schema: dict[str, Any] | None = None,
        *,
        index: int = 0,
        max_rows: int = MAX_ROWS,
    ) -> list[FieldDistribution]:
        """Return the log-probability of each value in a JSON reply, and of all values that its schema lists.

        If the schema lists the values allowed at a position (enum, const, boolean, integers between two
        bounds, or a union of these), `members` has the log-probability of each value, summed over all
        tokenizations, and `grammar_members` has the same under the request's grammar. This runs additional
        forward passes, most of one token each.

        Args:
            output: an output from a call that requested `logprobs`.
            schema: the JSON schema of the reply; None uses the schema in the request's `response_format`.
            index: index of the completion in the output.
            max_rows: maximum number of next-token distributions to compute for the members of one value; if
                it is too small, `unresolved` is the probability of the token sequences not explored.

        Raises:
            ParameterError: the output has no logprobs under the model's own distribution or is not valid
                JSON, the schema is missing, invalid or lists no values, or the weights were replaced.
            EngineError: the engine failed or was closed, or the weights were replaced during the call.
        """
        from logprobe.next_token.fields import field_distributions

        return await field_distributions(
            self._rows, lambda: self._spelling_tools, output, schema, index=index, max_rows=max_rows
        )

    @cached_property
    def _spelling_tools(self) -> SpellingTools:
        from logprobe.next_token.fields import SpellingTools

        return SpellingTools(self._loaded)

    @cached_property
    def _rows(self) -> EngineLM[Row]:
        """Computes whole next-token distributions on this LLM's engine; created on first use."""
        from logprobe.next_token.engine_lm import EngineLM
        from logprobe.next_token.rows import RowCache

        rows: EngineLM[Row] = EngineLM(
            self._loaded,
            as_caller=lambda rows: rows,
            cache=RowCache(ROW_CACHE_BYTES),
            batch_size=1,
            timeout=0,
            owns_engine=False,
        )
        self._owned.callback(rows.close)  # runs before the engine is closed
        return rows

    @coroutine_method
    async def uncertainty(
        self,
        prompt: Prompt | Conversation,
        n: int = 10,
        sampling_params: SamplingParams | None = None,
        *,
        same: Same | None = None,
        stop_when: LowConfidence | None = None,
        window: int | None = None,
        k: int | None = None,
        self_certainty: bool = False,
        progress: bool = False,
    ) -> Uncertainty:
        """Sample answers and compute the model's uncertainty from their exact probabilities.

        Args:
            prompt: a text or token ids that the answers continue, or a conversation that they answer using
                the model's chat template.
            n: number of answers; the prompt is computed once.
            sampling_params: sampling parameters; the default is `SamplingParams()`. With a `seed` the answers
                are reproducible, and the first answer equals the one from `generate`. Parameters that select
                logprobs must be left at their defaults.
            same: function that returns True if two texts mean the same, called on a worker thread; by
                default, texts mean the same if they are equal without surrounding whitespace.
            stop_when: stops an answer when its confidence is low; a stopped answer is in `answers`, but is
                left out of all measures outside `answers`.
            window: number of tokens in a group for the group confidence; the default is the window of
                `stop_when`, or 2,048.
            k: number of likeliest tokens that define a token's confidence; the default is the `k` of
                `stop_when`, or 20.
            self_certainty: also report the self-certainty of each answer, for which each answer is scored
                again with whole-vocabulary rows.
            progress: show a progress bar on stderr.

        Raises:
            ParameterError: `n` is below 1, several answers are requested at temperature 0, or the prompt, a
                parameter or `same` is invalid.
            BatchError: some answers failed.
            WeightsReplacedError: the weights were replaced between answers.
        """
        from logprobe.analysis.uncertainty import draw_plan

        plan = draw_plan(
            n, sampling_params, stop_when=stop_when, window=window, k=k, self_certainty=self_certainty
        )
        answers = await self._client.draw(prompt, plan, watch=partial(progress_bar, shown=progress))
        return await asyncio.to_thread(plan.sum_up, answers, same)

    @coroutine_method
    async def perplexity(
        self,
        text: str | Iterable[str],
        *,
        stride: int | None = None,
        window: int | None = None,
        bos: bool | None = None,
        progress: bool = False,
    ) -> Perplexity:
        """Compute the perplexity of a text of any length, each token scored once.

        Args:
            text: a text, or an iterable of its parts (such as an open file), which is streamed.
            stride: tokens from one window's start to the next one's; the default is half a window. If the
                stride equals the window, the windows are disjoint, and the first token of each is not scored.
            window: tokens per window; the default is the model's context.
            bos: True puts BOS (EOS if the model has no BOS) before the text, False does not, and None does
                what the tokenizer does.
            progress: show a progress bar on stderr.

        Raises:
            ParameterError: the window or stride is invalid, or the text cannot be encoded.
            BatchError: a window failed.
            WeightsReplacedError: the weights were replaced between two windows.
        """
        from logprobe.analysis.windows import perplexity

        num_bytes = len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else None
        with byte_bar(num_bytes, shown=progress) as advance:
            return await self._run_analysis(
                partial(perplexity, text=text, stride=stride, window=window, bos=bos, advance=advance)
            )

    @coroutine_method
    async def surprisal(
        self,
        texts: str | Iterable[str],
        *,
        boundary: Boundary | None = None,
        unit: NatsOrBits = "nats",
        bos: bool | None = None,
        window: int | None = None,
        stride: int | None = None,
    ) -> list[ScoredText]:
        """Score every token of one or more texts, with ranks and entropies.

        With `boundary="end"`, the probability of a word or sentence includes that its last word ends there,
        and is conditional on a word beginning at its first position: P(tokens) · P(the next token begins a
        word, or ends the text) / P(a token that begins a word is at the first position). The probabilities of
        all words then sum to 1 (Pimentel & Meister 2024, https://arxiv.org/abs/2406.14561; Oh & Schuler 2024,
        https://arxiv.org/abs/2406.10851). A token begins a word if its text begins with whitespace or if it
        is EOS. If the word's actual first token does not begin a word in this sense (mostly at the beginning
        of a text), there is no division, as in minicons' `bow_correction`. The logprobs of tokens and spans
        do not change.

        Args:
            texts: one or more texts of any length; a text longer than the context is scored in sliding
                windows.
            boundary: "end" includes the end of a word in its probability; None includes only the word's
                tokens.
            unit: unit of surprisals and tables, "nats" or "bits"; logprobs are always in nats.
            bos: True puts BOS (EOS if the model has no BOS) before each text, so that the text's first token
                is scored too; False does not, and None does what the tokenizer does.
            window: tokens per window; the default is the model's context.
            stride: tokens from one window's start to the next one's; the default is half a window. If the
                stride equals the window, the windows are disjoint, and the first token of each window is not
                scored.

        Raises:
            ParameterError: a text cannot be encoded, or the window, stride, boundary or unit is invalid.
            BatchError: some texts failed.
        """
        from logprobe.analysis.texts import surprisal

        return await self._run_analysis(
            partial(
                surprisal, texts=texts, boundary=boundary, unit=unit, bos=bos, window=window, stride=stride
            )
        )

    @coroutine_method
    async def minimal_pairs(
        self,
        pairs: Iterable[tuple[str, str]],
        categories: Sequence[str] | None = None,
        *,
        bos: bool | None = True,
    ) -> MinimalPairs:
        """Score pairs of a good and a bad text and compute the accuracy, overall and by category.

        The logprobs of whole texts are compared, as in BLiMP (Warstadt et al. 2020,
        https://arxiv.org/abs/1912.00582).

        Args:
            pairs: (good, bad) texts.
            categories: one category name per pair; None computes only the overall accuracy.
            bos: True puts BOS (EOS if the model has no BOS) before each text, so that the text's first token
                counts; False does not, and None does what the tokenizer does.

        Raises:
            ParameterError: there are no pairs, a text has no scored tokens, or `categories` does not have
                one name per pair.
            BatchError: some texts failed.
        """
        from logprobe.analysis.pairs import minimal_pairs

        return await self._run_analysis(partial(minimal_pairs, pairs=pairs, categories=categories, bos=bos))

    async def _run_analysis(self, analyse: Callable[[Scorer], T]) -> T:
        """Run a function of `analysis` on a worker thread; its scores are computed on this event loop."""
        waiter = Waiter()
        return await waiter.run_in_thread(partial(analyse, BlockingScorer(self, waiter)))

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer, which is loaded on first use."""
        return self.text.tokenizer

    def __repr__(self) -> str:
        facts = self.engine.capabilities()
        lora = "" if self.lora is None else f", lora={self.lora!r}"
        name = f"{type(self).__name__}({self.config.model!r}"
        return f"{name}, {facts.engine}, {facts.device}, {facts.dtype}{lora})"


class BlockingScorer:
    """A `Scorer` for functions of `analysis` that run on a worker thread."""

    def __init__(self, model: Model, waiter: Waiter) -> None:
        self._model, self._waiter = model, waiter
        self.text, self.engine, self.lora = model.text, model.engine, model.lora

    def score(self, pairs: Sequence[tuple[Any, Any] | Split], **options: Any) -> list[Score]:
        """Score continuations with the options of `LLM.score`."""
        return self._waiter.wait(Model.score(self._model, pairs, **options))

    def generate(self, prompts: Sequence[list[int]], sampling_params: SamplingParams) -> list[RequestOutput]:
        """Generate completions as `LLM.generate` does."""
        return self._waiter.wait(Model.generate(self._model, prompts, sampling_params))

    def with_lora(self, name: str | None) -> BlockingScorer:
        """Return a scorer for the model with a LoRA adapter, or without one."""
        return BlockingScorer(self._model.with_lora(name), self._waiter)
