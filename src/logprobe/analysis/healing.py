"""Byte-level scores of continuations that start inside a token, computed by running `analysis.covers`.

Each next-token row is one request for the logprobs of listed token ids. The engine caches the context, so a
row costs about as much as one token.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from logprobe.analysis.covers import SpanSum, group_splits
from logprobe.analysis.score_requests import admit_splits, scored, scored_total
from logprobe.analysis.spellings import token_index
from logprobe.errors import LogprobeError, WeightsReplacedError
from logprobe.records.values import IdLists
from logprobe.sampling import SamplingParams
from logprobe.text.boundary import Split

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.analysis.covers import Ask, Cover
    from logprobe.analysis.spellings import Floats, Ids
    from logprobe.engine.client import Client
    from logprobe.engine.request import RequestOutput, Requests
    from logprobe.records.values import IntArray

T = TypeVar("T")
GROUPS_AT_ONCE: Final = 8
ROWS_AT_ONCE: Final = 32  # requests that a group admits at a time, so that other requests are not starved


class Healer:
    """Computes byte-level log-probabilities of continuations that start inside a token.

    Args:
        client: sends the requests.
        lora: name of the LoRA adapter, if any.
        requests: admits the requests.
        sampling: use the distribution that these parameters would sample from; None uses the model's own
            distribution.
    """

    def __init__(
        self, client: Client, lora: str | None, requests: Requests, sampling: SamplingParams | None
    ) -> None:
        self._client, self._requests, self._sampling = client, requests, sampling
        self._params = SamplingParams(max_tokens=0, prompt_logprobs=0, lora=lora)
        # One token more than the context, because the last token is never run.
        self._limit = client.engine.capabilities().max_model_len + 1
        self._turns = asyncio.Semaphore(GROUPS_AT_ONCE)

    async def logprobs(
        self, splits: Sequence[Split], outputs: Sequence[RequestOutput]
    ) -> list[float | LogprobeError | None]:
        """Return each continuation's log-probability in nats, or the error; None for a split without healing.

        Splits that have the same tokens before the healed bytes, and the same healed bytes of the context,
        share next-token rows.

        Args:
            splits: contexts with their continuations.
            outputs: the output of each split's own request. If that request ran with other weights than the
                sums, the split's result is an error.
        """
        numbers: list[float | LogprobeError | None] = [None] * len(splits)
        groups = group_splits(splits)
        if groups:
            sums = [
                self._sums([splits[place] for place in own], {outputs[place].weights_number for place in own})
                for own in groups
            ]
            found = await asyncio.gather(*sums)
            for place, number in zip(chain.from_iterable(groups), chain.from_iterable(found), strict=True):
                numbers[place] = number
        return numbers

    async def _sums(self, splits: list[Split], loads: set[int]) -> Sequence[float | LogprobeError]:
        async with self._turns:
            try:
                return await self._sum_up(splits, loads)
            except LogprobeError as error:
                return [error] * len(splits)

    async def _sum_up(self, splits: list[Split], loads: set[int]) -> list[float]:
        vocab_size = self._client.engine.capabilities().vocab_size
        index = await asyncio.to_thread(token_index, self._client.text, vocab_size)
        span = SpanSum(splits, index)
        while asks := await asyncio.to_thread(span.next_asks):
            rows: list[Floats | None] = []
            for some in _batches(asks):
                parts = [(_before_row(span.given, ask), ask.wanted) for ask in some]
                outputs = await self._run(parts, loads)
                rows += [None if output is None else _named(output) for output in outputs]
            await asyncio.to_thread(span.take, zip(asks, rows, strict=True))
        rests = span.rests()
        totals: list[float] = []
        for covers in _batches([*chain.from_iterable(rests)]):
            outputs = await self._run([(_after_cover(span.given, *cover), None) for cover in covers], loads)
            totals += [-np.inf if output is None else scored_total(output) for output in outputs]
        remaining = iter(totals)
        return span.logprobs([[next(remaining) for _ in rest] for rest in rests])

    async def _run(
        self, parts: Sequence[tuple[Split, Ids | None]], loads: set[int]
    ) -> list[RequestOutput | None]:
        """Run each split; report the logprobs of its paired ids, if any, at the split's last position.

        The output is None for a split that is too long for the model.

        Raises:
            LogprobeError: a request failed, or the weights were replaced.
        """
        fitting = [(split, ids) for split, ids in parts if len(split.token_ids) <= self._limit]
        admitted = [
            one
            for split, ids in fitting
            for one in admit_splits([split], self._naming(ids), self._requests, sampling=self._sampling)
        ]
        outputs = await self._client.run(admitted)
        for output in outputs:
            if output.error is not None:
                raise output.error
            loads.add(output.weights_number)
        if len(loads) > 1:
            raise WeightsReplacedError("the weights were replaced while a pair was scored; score it again")
        remaining = iter(outputs)
        return [next(remaining) if len(split.token_ids) <= self._limit else None for split, _ in parts]

    def _naming(self, ids: Ids | None) -> SamplingParams:
        return self._params if ids is None else replace(self._params, logprob_token_ids=IdLists.of([ids]))


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), ROWS_AT_ONCE):
        yield items[start : start + ROWS_AT_ONCE]


def _before_row(given: IntArray, ask: Ask) -> Split:
    """Return a split whose last position has the requested row; the last token is arbitrary."""
    ids = np.concatenate([given, np.array(ask.token_ids, np.int32), ask.wanted[:1].astype(np.int32)])
    return Split(ids, len(ids) - 1)


def _after_cover(given: IntArray, cover: Cover, rest: IntArray) -> Split:
    ids = np.concatenate([given, np.array(cover.token_ids, np.int32)])
    return Split(np.concatenate([ids, rest]), len(ids))


def _named(output: RequestOutput) -> Floats:
    """Return the log-probabilities, in nats, of the requested ids at the last position, ordered by id."""
    given = scored(output).given
    assert given is not None, "the request has logprob_token_ids"
    entries = given[len(given) - 1 :].arrays
    return entries.logprobs[np.argsort(entries.token_ids)].astype(np.float64)
