"""`Distributions`: the methods in `NextTokenLM` that return next-token distributions or parts of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic

import numpy as np

from logprobe.errors import ParameterError, require
from logprobe.next_token.base import BaseLM
from logprobe.next_token.rows import ArrayT, KnownPrefix, TopTokens, top_tokens
from logprobe.sampling.params import as_int
from logprobe.text.edge import as_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from logprobe.next_token.base import TokenIds


class Distributions(BaseLM, Generic[ArrayT]):
    """Next-token distributions for single prefixes, batches, token tries, and growing prefixes."""

    _as_caller: Callable[[npt.NDArray[np.float32]], ArrayT]

    async def next_token_logprobs(
        self, token_ids: TokenIds, *, lora: str | None = None, use_cache: bool = True
    ) -> ArrayT:
        """Return the log-probabilities of the token after `token_ids`: (V,) float32, nats, read-only.

        `use_cache=False` bypasses the row cache; the engine's prefix cache is still used.

        Raises:
            ParameterError: an id is outside the vocabulary, there are more ids than fit in the context,
                there are no ids and the model has no BOS token, or the LoRA name is unknown.
            EngineError: the engine failed, was closed, or aborted the request.
        """
        [row] = await self._rows([token_ids], self._chosen_lora(lora), use_cache=use_cache)
        return self._as_caller(row)

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[TokenIds], *, lora: str | None = None, use_cache: bool = True
    ) -> ArrayT:
        """Return the log-probabilities of the token after each of n prefixes: (n, V) float32, nats.

        Common beginnings are computed once. The requests do not wait for a larger batch.

        Raises:
            ParameterError: a prefix is invalid; in this case nothing is computed.
            EngineError: the engine failed, was closed, or aborted a request.
        """
        chosen = self._chosen_lora(lora)
        rows = await self._rows(token_ids_list, chosen, use_cache=use_cache, is_urgent=True)
        if not rows:
            return self._as_caller(np.empty((0, self.vocab_size), dtype=np.float32))
        return self._as_caller(await asyncio.to_thread(np.stack, rows))

    def next_token_logprobs_sync(
        self, token_ids: TokenIds, *, lora: str | None = None, use_cache: bool = True
    ) -> ArrayT:
        """Blocking version of `next_token_logprobs`; does not wait for a larger batch."""
        asked = self._rows([token_ids], self._chosen_lora(lora), use_cache=use_cache, is_urgent=True)
        return self._as_caller(self._bridge.run(asked)[0])

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[TokenIds], *, lora: str | None = None, use_cache: bool = True
    ) -> ArrayT:
        """Blocking version of `batch_next_token_logprobs`."""
        asked = self.batch_next_token_logprobs(token_ids_list, lora=lora, use_cache=use_cache)
        return self._bridge.run(asked)

    async def next_token_topk(self, token_ids: TokenIds, k: int, *, lora: str | None = None) -> TopTokens:
        """Return the `k` most likely next tokens in descending order; ties are ordered by ascending id.

        Raises:
            ParameterError: `k` is not an integer in [1, V], or for the reasons in `next_token_logprobs`.
        """
        k = as_int("k", k)
        require(0 < k <= self.vocab_size, "k", f"must be in [1, {self.vocab_size}], got {k}")
        [row] = await self._rows([token_ids], self._chosen_lora(lora))
        return top_tokens(row, k)

    async def next_token_logprobs_for(
        self, token_ids: TokenIds, logprob_token_ids: TokenIds, *, lora: str | None = None
    ) -> ArrayT:
        """Return the log-probabilities of the given next tokens: (len(logprob_token_ids),) float32, nats.

        Raises:
            ParameterError: a given id is outside the vocabulary, or for the reasons in `next_token_logprobs`.
        """
        given = as_token_ids(logprob_token_ids, "logprob_token_ids")
        outside = given[given >= self.vocab_size][:1]
        if len(outside):  # not `require`: formatting the array on every call would dominate
            limit = f"token id {outside} lies outside the vocabulary [0, {self.vocab_size})"
            raise ParameterError("logprob_token_ids", limit)
        [row] = await self._rows([token_ids], self._chosen_lora(lora))
        return self._as_caller(row[given])

    async def trie_logprobs(
        self, sequences: Iterable[TokenIds], *, lora: str | None = None
    ) -> dict[tuple[int, ...], ArrayT]:
        """Return a map from each non-empty prefix of `sequences` to the (V,) log-probabilities after it.

        For the empty prefix, use `next_token_logprobs`. Common prefixes are computed once.
        """
        whole = [tuple(as_token_ids(ids, "sequences").tolist()) for ids in sequences]
        nodes = {ids[:end] for ids in whole for end in range(1, len(ids) + 1)}
        ordered = sorted(nodes)
        rows = await self._rows(ordered, self._chosen_lora(lora), is_urgent=True)
        return dict(zip(ordered, map(self._as_caller, rows), strict=True))

    async def start(self, token_ids: TokenIds, *, lora: str | None = None) -> KnownPrefix[ArrayT]:
        """Return a prefix together with its next-token row, as the starting point for `extend`."""
        ids, chosen = self._as_prompt(token_ids), self._chosen_lora(lora)
        [row] = await self._rows([ids], chosen)
        return KnownPrefix(ids, chosen, self._as_caller(row))

    async def extend(self, known: KnownPrefix[ArrayT], token_id: int) -> KnownPrefix[ArrayT]:
        """Append a token, with the same LoRA adapter; computes one token if the prefix is still cached."""
        ids = as_token_ids([*known.token_ids, as_int("token_id", token_id)], "token_id")
        [row] = await self._rows([ids], known.lora)
        return KnownPrefix(ids, known.lora, self._as_caller(row))
