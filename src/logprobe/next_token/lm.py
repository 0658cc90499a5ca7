"""`NextTokenLM`: a model asked for next-token distributions, whatever engine answers.

Before it: `AsyncLM` and `RemoteLM`, which say where the engine comes from. After it: the desk, which turns
concurrent asks into requests to that engine, each distinct one computed once.
"""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Self

import numpy as np

from logprobe.engine.backends.bridge import LoopThread
from logprobe.engine.request import Requests
from logprobe.errors import EngineClosedError, ParameterError, require
from logprobe.models.lora import resolved_folder
from logprobe.next_token.desk import Desk, check_batching, shut_down, shut_down_elsewhere
from logprobe.next_token.rows import (
    ArrayT,
    KnownPrefix,
    Token,
    TopTokens,
    nth_seed,
    row_params,
    sampled,
    top_tokens,
)
from logprobe.sampling import SamplingParams
from logprobe.text.edge import as_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt

    from logprobe.engine.protocol import RowEngine, RowModel, Words
    from logprobe.next_token.rows import Row, RowCache, SampledIds
    from logprobe.records.values import IntArray

    TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
    FloatArray = npt.NDArray[np.float32]

DEFAULT_CACHE_BYTES = 1 << 28


class NextTokenLM(ABC, Generic[ArrayT]):
    """A model asked for next-token distributions; rows are (V,) float32 log-probabilities in nats, read-only.

    Classes derived from it say as what callers are given them: see `_given`.
    Asks may come from any number of event loops and threads. `token_ids` may be empty where the model has a
    BOS, which then stands alone. `lora` names LoRA weights; without it those of `set_lora` are used.

    Args:
        loaded: the engine, with its words.
        cache: of rows that are kept whole.
        batch_size: asks that start a step at once where the engine is idle.
        timeout: seconds after which the first of fewer asks starts a step; a busy engine takes asks at once.
        owns_engine: whether `cleanup` closes the engine too.
        bridge: the loop of an engine that needs one; it then serves both, and `cleanup` closes it.

    Raises:
        ParameterError: a setting that cannot be used.
    """

    def __init__(
        self,
        loaded: RowModel,
        *,
        cache: RowCache,
        batch_size: int = 64,
        timeout: float = 0.001,
        owns_engine: bool = False,
        bridge: LoopThread | None = None,
    ) -> None:
        check_batching(batch_size=batch_size, timeout=timeout)
        self._cache = cache
        self._engine: RowEngine = loaded.engine
        self._text: Words = loaded.text
        self._lora: str | None = None
        self._requests = Requests(loaded.engine)
        self._bridge = LoopThread() if bridge is None else bridge
        self._desk = Desk(self._engine, self._cache, self._bridge, batch_size=batch_size, timeout_s=timeout)
        self._parts = (self._desk, self._bridge, self._engine if owns_engine else None)
        # For an object that is dropped without `cleanup`; a thread, since the collector may run on any.
        self._finalizer = weakref.finalize(self, shut_down_elsewhere, *self._parts)
        self._finalizer.atexit = False

    @abstractmethod
    def _given(self, rows: FloatArray) -> ArrayT:
        """Rows as callers get them: from one (V,), shared and read-only, or (n, V) of the caller's own."""

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
        return self._given(row)

    async def batch_next_token_logprobs(
        self, prefixes: Sequence[TokenIds], *, lora: str | None = None, use_cache: bool = True
    ) -> ArrayT:
        """The distributions after each prefix: (len(prefixes), V) float32, nats; what they share is run once.

        It starts at once, without waiting for more asks.

        Raises:
            ParameterError: a prefix that cannot be served; none was asked then.
            EngineError: the engine failed, was closed, or gave an ask up.
        """
        chosen = self._chosen_lora(lora)
        rows = await self._rows(prefixes, chosen, use_cache=use_cache, is_urgent=True)
        if not rows:
            return self._given(np.empty((0, self.vocab_size), dtype=np.float32))
        return self._given(await asyncio.to_thread(np.stack, rows))

    def next_token_logprobs_sync(
        self, token_ids: TokenIds, *, lora: str | None = None, use_cache: bool = True
    ) -> ArrayT:
        """`next_token_logprobs` for callers without an event loop; it starts at once."""
        asked = self._rows([token_ids], self._chosen_lora(lora), use_cache=use_cache, is_urgent=True)
        return self._given(self._bridge.run(asked)[0])

    def next_token_logprobs_uncached(self, token_ids: TokenIds, *, lora: str | None = None) -> ArrayT:
        """`next_token_logprobs_sync` with `use_cache=False`, by genlm-backend's name."""
        return self.next_token_logprobs_sync(token_ids, lora=lora, use_cache=False)

    def batch_next_token_logprobs_sync(
        self, prefixes: Sequence[TokenIds], *, lora: str | None = None, use_cache: bool = True
    ) -> ArrayT:
        """`batch_next_token_logprobs` for callers without an event loop."""
        asked = self.batch_next_token_logprobs(prefixes, lora=lora, use_cache=use_cache)
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
        return self._given(row[given])

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
        return dict(zip(ordered, map(self._given, rows), strict=True))

    async def start(self, token_ids: TokenIds, *, lora: str | None = None) -> KnownPrefix[ArrayT]:
        """A prefix with its row, for `extend`."""
        ids, chosen = self._as_prompt(token_ids), self._chosen_lora(lora)
        [row] = await self._rows([ids], chosen)
        return KnownPrefix(ids, chosen, self._given(row))

    async def extend(self, known: KnownPrefix[ArrayT], token_id: int) -> KnownPrefix[ArrayT]:
        """A prefix one token longer, under the same LoRA weights; it costs one token while that is cached."""
        ids = as_token_ids([*known.token_ids, token_id], "token_id")
        [row] = await self._rows([ids], known.lora)
        return KnownPrefix(ids, known.lora, self._given(row))

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
    ) -> SampledIds:
        """Draw up to `max_tokens` tokens, ending before the first of `eos_token_ids` or with the context.

        No other token ends it: with no `eos_token_ids` not even the model's own end of text. A temperature of
        0 takes the likeliest token; the same seed gives the same tokens whatever runs beside. With `logprobs`
        the list's own `logprobs` records each token with so many alternatives, of the model's distribution.

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
            ignore_eos=True,
            lora=self._chosen_lora(lora),
        )
        admitted = self._requests.admit(self._as_prompt(prompt_token_ids), params)
        self._engine.submit([admitted])
        return sampled(await self._engine.result(admitted.request.request_id))

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
                )
            )
        return await asyncio.gather(*samples)

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
        self._engine.lora_number(name)
        loaded_from = self._engine.list_loras()[name]
        is_same = path is None or loaded_from in {str(path), str(resolved_folder(path))}
        require(is_same, "path", f"lora {name!r} came from {loaded_from}, not from {path}")
        self._lora = name

    def clear_lora(self) -> None:
        """Answer asks that name no LoRA weights by the base model."""
        self._lora = None

    def list_loras(self) -> dict[str, str]:
        """The loaded LoRA weights: name → path."""
        return self._engine.list_loras()

    def clear_cache(self) -> None:
        """Forget the rows kept whole; what the engine knows of prefixes stays."""
        self._cache.clear()

    def reset_async_queries(self) -> None:
        """End every ask in flight with `RequestAbortedError`."""
        self._check_open()
        self._desk.reset()

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
    def vocab_size(self) -> int:
        """The width of every row: the model's, which may exceed the tokenizer's."""
        return self._engine.capabilities().vocab_size

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
        prompts = [self._as_prompt(ids) for ids in prefixes]
        loads = (0 if lora is None else self._engine.lora_number(lora), self._engine.weights_number)
        rows = [self._cache.get((lora, *loads, ids.tobytes())) if use_cache else None for ids in prompts]
        # The longest first: it runs as one chunk, and its own prefixes are then known.
        missing = sorted((i for i, row in enumerate(rows) if row is None), key=lambda i: -len(prompts[i]))
        params = row_params(lora)
        admitted = [self._requests.admit(prompts[i], params, wants_row=True) for i in missing]
        waiters = self._desk.ask(admitted, is_urgent=is_urgent, uses_cache=use_cache)
        waits = map(asyncio.wrap_future, waiters)  # of many asks in one turn each has one
        found = [await next(waits)] if len(waiters) == 1 else await asyncio.gather(*waits)
        for place, row in zip(missing, found, strict=True):
            rows[place] = row
        return [row for row in rows if row is not None]

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
            self._engine.lora_number(chosen)  # before a kept row could answer for weights that were removed
        return chosen

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise EngineClosedError("this model was cleaned up; make a new one")
