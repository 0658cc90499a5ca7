"""`Distributions`: the methods of `NextTokenLM` that give next-token rows, or parts of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic

import numpy as np

from logprobe.errors import ParameterError, require
from logprobe.next_token.base import BaseLM
from logprobe.next_token.rows import ArrayT, KnownPrefix, TopTokens, top_tokens
from logprobe.text.edge import as_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from logprobe.next_token.base import TokenIds


class Distributions(BaseLM, Generic[ArrayT]):
    """Rows of single prefixes, of batches, of the nodes of a token trie, and prefix by prefix."""

    _as_caller: Callable[[npt.NDArray[np.float32]], ArrayT]

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
