"""`NextTokenLM`: a model asked for next-token distributions, whatever begins its rows.

Before it: `AsyncLM`, `AsyncVirtualLM` and `RemoteLM`, which say where rows come from and as what they are
given. After it: the batcher, which has each distinct row of concurrent asks begun once.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar

import numpy as np

from logprobe.analysis.client import ScoringClient
from logprobe.analysis.labels import SCALE, as_asked, classify_plan, judge_plan, rerank_plan
from logprobe.analysis.spellings import MAX_ROWS
from logprobe.analysis.uncertainty import draw_plan
from logprobe.engine.backends.bridge import LoopThread
from logprobe.engine.request import check_tokens
from logprobe.errors import EngineClosedError, ParameterError, require
from logprobe.models.lora import resolved_folder
from logprobe.next_token.batcher import Batcher, check_batching, shut_down, shut_down_elsewhere
from logprobe.next_token.fields import FieldSums, SpellingTools
from logprobe.next_token.rows import (
    ArrayT,
    KnownPrefix,
    Prefix,
    Token,
    TopTokens,
    row_params,
    top_tokens,
)
from logprobe.next_token.source import EngineRows
from logprobe.sampling import SamplingParams
from logprobe.sampling.params import nth_seed
from logprobe.text.edge import as_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt

    from logprobe.analysis.labels import Asked, Classification, Correction, Judgement, Labels, Plan
    from logprobe.analysis.members import FieldDistribution
    from logprobe.analysis.uncertainty import LowConfidence, Same, Uncertainty
    from logprobe.engine.backends.start import LoadedModel
    from logprobe.engine.client import Prompt
    from logprobe.engine.front import OnRunning
    from logprobe.engine.request import RequestOutput
    from logprobe.next_token.rows import Row, RowCache, SampledIds
    from logprobe.next_token.source import ModelText, RowSource
    from logprobe.records.values import IntArray
    from logprobe.text.chat import Conversation
    from logprobe.text.edge import TextEdge

    TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
    FloatArray = npt.NDArray[np.float32]

T = TypeVar("T")
DEFAULT_CACHE_BYTES = 1 << 28
SCORED: Final = SamplingParams(max_tokens=0, prompt_logprobs=0)


class NextTokenLM(Generic[ArrayT]):
    """A model asked for next-token distributions; rows are (V,) float32 log-probabilities in nats, read-only.

    Asks may come from any number of event loops and threads. `token_ids` may be empty where the model has a
    BOS, which then stands alone. `lora` names LoRA weights; without it those of `set_lora` are used.

    Args:
        source: what begins rows and samples.
        text: what the model's ids stand for.
        as_caller: rows as callers get them, from one (V,), shared and read-only, or (n, V) of their own.
        on_rows: shown the rows of each answer, before callers get them.
        cache: of rows that are kept whole.
        batch_size: asks that start a step at once where the engine is idle.
        timeout: seconds after which the first of fewer asks starts a step; a busy engine takes asks at once.
        owns_source: whether `cleanup` closes the source too.
        bridge: the loop of a source that needs one; it then serves both, and `cleanup` closes it.

    Raises:
        ParameterError: a setting that cannot be used.
    """

    _ignores_eos: ClassVar[bool] = True  # in `sample`, unless a call says otherwise

    def __init__(
        self,
        source: RowSource,
        text: ModelText,
        *,
        as_caller: Callable[[FloatArray], ArrayT],
        on_rows: Callable[[list[Row]], object] | None = None,
        cache: RowCache,
        batch_size: int,
        timeout: float,
        owns_source: bool,
        bridge: LoopThread | None = None,
    ) -> None:
        check_batching(batch_size=batch_size, timeout=timeout)
        self._source = source
        self._text = text
        self._as_caller = as_caller
        self._on_rows = on_rows
        self._cache = cache
        self._lora: str | None = None
        self._bridge = LoopThread() if bridge is None else bridge
        self._batcher = Batcher(source, cache, self._bridge, batch_size=batch_size, timeout_s=timeout)
        self._parts = (self._batcher, self._bridge, source if owns_source else None)
        # For an object that is dropped without `cleanup`; a thread, since the collector may run on any.
        self._finalizer = weakref.finalize(self, shut_down_elsewhere, *self._parts)
        self._finalizer.atexit = False

    async def next_token_logprobs(
        self, token_ids: TokenIds, *, lora: str | None = None, use_cache: bool = True
    ) -> ArrayT:
        """The distribution of the token after `token_ids`: (V,) float32, nats, read-only.

        With `use_cache=False` no kept row answers and this one is not kept; known prefixes serve still.

        Raises:
            ParameterError: ids outside the vocabulary, more than the context holds, none without a BOS, or an
                unknown name of LoRA weights.
            EngineError: the engine failed, was closed, or gave the ask up.
        """
        [row] = await self._rows([token_ids], self._chosen_lora(lora), use_cache=use_cache)
        return self._as_caller(row)

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[TokenIds], *, lora: str | None = None, use_cache: bool = True
    ) -> ArrayT:
        """The distributions after each of n prefixes: (n, V) float32, nats; what they share is run once.

        It starts at once, without waiting for more asks.

        Raises:
            ParameterError: a prefix that cannot be served; none was asked then.
            EngineError: the engine failed, was closed, or gave an ask up.
        """
        chosen = self._chosen_lora(lora)
        rows = await self._rows(token_ids_list, chosen, use_cache=use_cache, is_urgent=True)
        if not rows:
            return self._as_caller(np.empty((0, self.vocab_size), dtype=np.float32))
        return self._as_caller(await asyncio.to_thread(np.stack, rows))

    def next_token_logprobs_sync(
        self, token_ids: TokenIds, *, lora: str | None = None, use_cache: bool = True
    ) -> ArrayT:
        """`next_token_logprobs` for callers without an event loop; it starts at once."""
        asked = self._rows([token_ids], self._chosen_lora(lora), use_cache=use_cache, is_urgent=True)
        return self._as_caller(self._bridge.run(asked)[0])

    def next_token_logprobs_uncached(self, token_ids: TokenIds, *, lora: str | None = None) -> ArrayT:
        """`next_token_logprobs_sync` with `use_cache=False`, by genlm-backend's name."""
        return self.next_token_logprobs_sync(token_ids, lora=lora, use_cache=False)

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[TokenIds], *, lora: str | None = None, use_cache: bool = True
    ) -> ArrayT:
        """`batch_next_token_logprobs` for callers without an event loop."""
        asked = self.batch_next_token_logprobs(token_ids_list, lora=lora, use_cache=use_cache)
        return self._bridge.run(asked)

    async def next_token_topk(self, token_ids: TokenIds, k: int, *, lora: str | None = None) -> TopTokens:
        """The `k` likeliest next tokens, descending, ties by ascending id.

        Raises:
            ParameterError: as `next_token_logprobs`, or `k` lies outside [1, V].
        """
        require(0 < k <= self.vocab_size, "k", f"must lie in [1, {self.vocab_size}], got {k}")
        [row] = await self._rows([token_ids], self._chosen_lora(lora))
        return top_tokens(row, k)

    async def next_token_logprobs_for(
        self, token_ids: TokenIds, given_token_ids: TokenIds, *, lora: str | None = None
    ) -> ArrayT:
        """The log-probabilities, nats, of these next tokens alone: (len(given_token_ids),) float32.

        Raises:
            ParameterError: as `next_token_logprobs`, or a given id lies outside the vocabulary.
        """
        given = as_token_ids(given_token_ids, "given_token_ids")
        outside = given[given >= self.vocab_size][:1]
        if len(outside):  # numpy takes longer to print an array than all the rest here
            limit = f"token id {outside} lies outside the vocabulary [0, {self.vocab_size})"
            raise ParameterError("given_token_ids", limit)
        [row] = await self._rows([token_ids], self._chosen_lora(lora))
        return self._as_caller(row[given])

    async def trie_logprobs(
        self, sequences: Iterable[TokenIds], *, lora: str | None = None
    ) -> dict[tuple[int, ...], ArrayT]:
        """The row of every node of the token trie that `sequences` span: each of their prefixes → its row.

        The root, which has no token, is left out; ask for it by an empty prefix. A token that many sequences
        share is run once.
        """
        whole = [tuple(as_token_ids(ids, "sequences").tolist()) for ids in sequences]
        nodes = {ids[:end] for ids in whole for end in range(1, len(ids) + 1)}
        ordered = sorted(nodes)
        rows = await self._rows(ordered, self._chosen_lora(lora), is_urgent=True)
        return dict(zip(ordered, map(self._as_caller, rows), strict=True))

    async def start(self, token_ids: TokenIds, *, lora: str | None = None) -> KnownPrefix[ArrayT]:
        """A prefix with its row, for `extend`."""
        ids, chosen = self._as_prompt(token_ids), self._chosen_lora(lora)
        [row] = await self._rows([ids], chosen)
        return KnownPrefix(ids, chosen, self._as_caller(row))

    async def extend(self, known: KnownPrefix[ArrayT], token_id: int) -> KnownPrefix[ArrayT]:
        """A prefix one token longer, under the same LoRA weights; it costs one token while that is cached."""
        ids = as_token_ids([*known.token_ids, token_id], "token_id")
        [row] = await self._rows([ids], known.lora)
        return KnownPrefix(ids, known.lora, self._as_caller(row))

    async def sample(
        self,
        prompt_token_ids: TokenIds,
        max_tokens: int,
        eos_token_ids: Iterable[int],
        temperature: float = 1.0,
        seed: int | None = None,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        logprobs: int | None = None,
        lora: str | None = None,
        ignore_eos: bool | None = None,
    ) -> SampledIds:
        """Draw up to `max_tokens` tokens, ending before the first of `eos_token_ids` or with the context.

        With `ignore_eos` no other token ends it, not even the model's own end of text; that is so by default
        but in `AsyncVirtualLM`. Without it that one ends it, too, and stays in the list where it is none of
        `eos_token_ids`. A temperature of 0 takes the likeliest token; the same seed gives the same tokens
        whatever runs beside. With `logprobs` the list's own `logprobs` records each token with so many
        alternatives, of the model's distribution.

        Raises:
            ParameterError: a value that cannot be served.
            EngineError: the engine failed, was closed, or gave the sample up.
        """
        self._check_open()
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            top_p=top_p,
            top_k=top_k,
            logprobs=logprobs,
            stop_token_ids=tuple(eos_token_ids),
            ignore_eos=self._ignores_eos if ignore_eos is None else ignore_eos,
            lora=self._chosen_lora(lora),
        )
        return await self._source.sample(self._as_prompt(prompt_token_ids), params)

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[TokenIds],
        max_tokens: int,
        eos_token_ids: Iterable[int],
        temperature: float = 1.0,
        seed: int | None = None,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        logprobs: int | None = None,
        lora: str | None = None,
        ignore_eos: bool | None = None,
    ) -> list[SampledIds]:
        """`sample` from each prompt at once; with a seed, samples of equal prompts still differ."""
        stops = tuple(eos_token_ids)
        seen: Counter[bytes] = Counter()
        samples = []
        for prompt in prompt_token_ids_list:
            key = as_token_ids(prompt).tobytes()
            own_seed = None if seed is None else nth_seed(seed, seen[key])
            seen[key] += 1
            samples.append(
                self.sample(
                    prompt,
                    max_tokens,
                    stops,
                    temperature,
                    own_seed,
                    top_p=top_p,
                    top_k=top_k,
                    logprobs=logprobs,
                    lora=lora,
                    ignore_eos=ignore_eos,
                )
            )
        return await asyncio.gather(*samples)

    async def classify(
        self,
        prompts: Asked | Sequence[Asked],
        labels: Labels,
        *,
        correction: Correction = "none",
        content_free: Asked | None = None,
        lora: str | None = None,
    ) -> Classification | list[Classification]:
        """`LLM.classify` for callers in an event loop.

        Raises:
            ParameterError: as there, an unknown name of LoRA weights, or the model is a server's.
            BatchError: some requests failed.
        """

        def lay_out(text: TextEdge) -> Plan[list[Classification]]:
            return classify_plan(text, prompts, labels, correction=correction, content_free=content_free)

        return as_asked(prompts, await self._summed_up(lay_out, lora))

    async def rerank(
        self, query: str, documents: Sequence[str], *, lora: str | None = None, **layout: Any
    ) -> list[float]:
        """`LLM.rerank` for callers in an event loop; errors as `classify`."""
        return await self._summed_up(lambda text: rerank_plan(text, query, documents, **layout), lora)

    async def judge(
        self,
        prompts: Asked | Sequence[Asked],
        scale: Sequence[float] = SCALE,
        *,
        lora: str | None = None,
    ) -> Judgement | list[Judgement]:
        """`LLM.judge` for callers in an event loop; errors as `classify`."""
        return as_asked(prompts, await self._summed_up(lambda text: judge_plan(text, prompts, scale), lora))

    async def fields(
        self,
        output: RequestOutput,
        schema: dict[str, Any] | None = None,
        *,
        index: int = 0,
        max_rows: int = MAX_ROWS,
    ) -> list[FieldDistribution]:
        """`LLM.fields` for callers in an event loop.

        Raises:
            ParameterError: as there, or the model is a server's.
            EngineError: the engine failed, was closed, got other weights meanwhile, or gave a row up.
        """
        self._check_open()
        loaded = self._here("ask it for field_logprobs")
        sums = await asyncio.to_thread(
            lambda: FieldSums(loaded, self._spelling_tools, output, schema, index, max_rows)
        )
        while asks := await asyncio.to_thread(sums.next_asks):
            rows = await self._rows([ask.token_ids for ask in asks], sums.lora, is_urgent=True)
            await asyncio.to_thread(sums.take, asks, rows)
        return sums.answer()

    async def uncertainty(
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
        lora: str | None = None,
    ) -> Uncertainty:
        """`LLM.uncertainty` for callers in an event loop; `same` is called on a thread.

        Raises:
            ParameterError: as there, an unknown name of LoRA weights, or the model is a server's.
            BatchError: some answers failed.
            WeightsReplacedError: other weights took over amid the answers.
        """
        self._check_open()
        loaded, chosen = self._here("ask where the model runs"), self._chosen_lora(lora)
        plan = draw_plan(n, params, stop_when=stop_when, window=window, k=k, self_certainty=self_certainty)
        answers = await ScoringClient(loaded.engine, loaded.text, lora=chosen).draw(prompt, plan)
        return await asyncio.to_thread(plan.sum_up, answers, same)

    async def _summed_up(self, lay_out: Callable[[TextEdge], Plan[T]], lora: str | None) -> T:
        self._check_open()
        loaded = self._here("ask it by POST /v1/classify, /v1/rerank and /v1/judge")
        chosen = self._chosen_lora(lora)
        plan = await asyncio.to_thread(lay_out, loaded.text)  # many texts take a while to tokenise
        scores = await ScoringClient(loaded.engine, loaded.text, lora=chosen).score(plan.pairs, SCORED)
        return plan.sum_up(scores)

    def set_lora(
        self,
        path: str | Path | None = None,
        name: str = "lora_1",
        *,
        lora_path: str | Path | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Answer asks that name no LoRA weights by these; those already asked keep theirs.

        `lora_path` and `lora_name` are genlm-backend's names for the two.

        Raises:
            ParameterError: no weights of that name are loaded, or they came from another path.
        """
        path, name = lora_path if path is None else path, lora_name or name
        self._source.loads(name)
        loaded_from = self._source.list_loras()[name]
        is_same = path is None or loaded_from in {str(path), str(resolved_folder(path))}
        require(is_same, "path", f"lora {name!r} came from {loaded_from}, not from {path}")
        self._lora = name

    def clear_lora(self) -> None:
        """Answer asks that name no LoRA weights by the base model."""
        self._lora = None

    def list_loras(self) -> dict[str, str]:
        """The loaded LoRA weights: name → path."""
        return self._source.list_loras()

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load LoRA weights from a folder; `set_lora` or `lora=` then use them.

        A name that is loaded again stands for the new weights; rows that were begun keep theirs.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
            ParameterError: the model is a server's.
        """
        self._loaded.engine.add_lora(name, path)

    def add_new_lora(
        self,
        path: str | Path | None = None,
        name: str = "lora_1",
        *,
        lora_path: str | Path | None = None,
        lora_name: str | None = None,
    ) -> None:
        """`add_lora` in genlm-backend's words: `add_new_lora(lora_path, lora_name="lora_1")`."""
        given = lora_path if path is None else path
        if given is None:
            raise ParameterError("path", "is missing; name the folder with the LoRA weights")
        self.add_lora(lora_name or name, given)

    def remove_lora(self, name: str) -> None:
        """Refuse new asks for LoRA weights; those in flight end as they would have.

        Raises:
            ParameterError: no such weights, or the model is a server's.
        """
        self._loaded.engine.remove_lora(name)

    async def load_weights(
        self,
        weights: str | Path | Mapping[str, Any],
        *,
        version: str | None = None,
        on_running: OnRunning = "finish",
    ) -> str:
        """`LLM.load_weights` for callers in an event loop; rows that are kept are of no use after it.

        Raises:
            ModelError: as there; the old weights go on.
            ParameterError: as there, or the model is a server's.
        """
        from logprobe.engine.front import check_on_running

        self._check_open()
        engine, finishes = self._loaded.engine, check_on_running(on_running)
        return await asyncio.to_thread(engine.load_weights, weights, version=version, finishes=finishes)

    def clear_cache(self) -> None:
        """Forget the rows kept whole; what the engine knows of prefixes stays."""
        self._cache.clear()

    def clear_kv_cache(self) -> None:
        """Let the engine forget every prefix that no request stands on.

        Raises:
            ParameterError: the model is a server's.
        """
        self._loaded.engine.forget_prefixes()

    def reset_async_queries(self) -> None:
        """End every ask in flight with `RequestAbortedError`."""
        self._check_open()
        self._batcher.reset()

    def cleanup(self) -> None:
        """End what is in flight and let go of all; a second call does nothing, asking afterwards raises."""
        if self._finalizer.detach() is not None:
            self._cache.clear()
            shut_down(*self._parts)

    def close(self) -> None:
        """`cleanup`, by the name that `LLM` has for it."""
        self.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.cleanup)

    @property
    def batch_size(self) -> int:
        """Asks that start a step at once where the engine is idle; may be set."""
        return self._batcher.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        check_batching(batch_size=batch_size)
        self._batcher.batch_size = batch_size

    @property
    def timeout(self) -> float:
        """Seconds after which the first of fewer asks starts a step; may be set."""
        return self._batcher.timeout_s

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        check_batching(timeout=timeout)
        self._batcher.timeout_s = timeout

    @property
    def underlying_model(self) -> Any:
        """The module of transformers, or of vLLM; None where the model lives in another process.

        Where an earlier load has proven the model here, the module is loaded when it is first asked for.
        """
        load = self._source.loaded.load_module if isinstance(self._source, EngineRows) else None
        return None if load is None else load()

    @property
    def vocab_size(self) -> int:
        """The width of every row: the model's, which may exceed the tokenizer's."""
        return self._source.capabilities().vocab_size

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._text.tokenizer

    @cached_property
    def byte_vocab(self) -> list[Token]:
        """The exact bytes of every id, `byte_vocab[i].token_id == i`; empty for an id of the model only."""
        return [Token(i, self._text.vocabulary.token_bytes(i)) for i in range(self.vocab_size)]

    @cached_property
    def str_vocab(self) -> list[str]:
        r"""Every id as text: bytes that are no whole UTF-8 show as `\xNN`, others as `<id>`."""
        return [self._text.vocabulary.token_text(i) for i in range(self.vocab_size)]

    async def _rows(
        self,
        prefixes: Iterable[TokenIds],
        lora: str | None,
        *,
        use_cache: bool = True,
        is_urgent: bool = False,
    ) -> list[Row]:
        self._check_open()
        loads = self._source.loads(lora)
        asked = [Prefix(lora, *loads, self._as_prompt(ids).tobytes()) for ids in prefixes]
        rows = [self._cache.get(prefix) if use_cache else None for prefix in asked]
        # The longest first: it runs as one chunk, and its own prefixes are then known.
        missing = sorted(
            (i for i, row in enumerate(rows) if row is None), key=lambda i: -len(asked[i].token_bytes)
        )
        for i in missing:
            self._check(asked[i])
        waiters = self._batcher.ask((asked[i] for i in missing), is_urgent=is_urgent, uses_cache=use_cache)
        waits = map(asyncio.wrap_future, waiters)  # of many asks of one iteration each has one
        found = [await next(waits)] if len(waiters) == 1 else await asyncio.gather(*waits)
        if 0 < len(missing) < len(asked) and self._has_turned(lora, loads):
            # Those that were kept are of weights whose place others have taken.
            ids = [prefix.token_ids for prefix in asked]
            return await self._rows(ids, lora, use_cache=use_cache, is_urgent=is_urgent)
        for place, row in zip(missing, found, strict=True):
            rows[place] = row
        answer = [row for row in rows if row is not None]
        if self._on_rows is not None:
            self._on_rows(answer)
        return answer

    def _has_turned(self, lora: str | None, loads: tuple[int, int]) -> bool:
        """Whether other weights answer now; LoRA weights that were removed end what was asked as before."""
        is_there = lora is None or lora in self._source.list_loras()
        return is_there and self._source.loads(lora) != loads

    def _check(self, prefix: Prefix) -> None:
        """Refuse what can never be served before anything is asked with it."""
        limits = self._source.capabilities()
        check_tokens(
            prefix.token_ids,
            row_params(prefix.lora),
            max_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
        )

    def _as_prompt(self, token_ids: TokenIds) -> IntArray:
        ids = as_token_ids(token_ids, "token_ids")
        if len(ids):
            return ids
        bos = self._text.bos_token_id
        require(bos is not None, "token_ids", "is empty and the model has no BOS; give at least one token")
        return np.array([bos], dtype=np.int32)

    def _chosen_lora(self, lora: str | None) -> str | None:
        chosen = self._lora if lora is None else lora
        if chosen is not None:
            self._source.loads(chosen)  # before a kept row could answer for weights that were removed
        return chosen

    @cached_property
    def _spelling_tools(self) -> SpellingTools:
        return SpellingTools(self._loaded)

    @property
    def _loaded(self) -> LoadedModel:
        return self._here("what its engine has and knows is changed over there")

    def _here(self, remedy: str) -> LoadedModel:
        """The engine, which a model of a server has not here."""
        if not isinstance(self._source, EngineRows):
            raise ParameterError("url", f"names a server: {remedy}")
        return self._source.loaded

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise EngineClosedError("this model was cleaned up; make a new one")
