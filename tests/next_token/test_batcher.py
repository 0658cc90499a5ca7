"""Requests made in one iteration of an event loop are batched."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.errors import EngineClosedError, RequestAbortedError
from logprobe.next_token.batcher import LoopBatches

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.next_token import AsyncLM

LIMIT_S = 120.0  # generous, also for a busy machine


@pytest.fixture
def given() -> list[list[int]]:
    return []


@pytest.fixture
def batches(given: list[list[int]]) -> LoopBatches[int]:
    return LoopBatches(given.append)


def test_items_of_one_iteration_are_handed_over_once_in_order(
    batches: LoopBatches[int], given: list[list[int]]
) -> None:
    async def add(number: int) -> None:
        batches.add([number])

    async def main() -> None:
        await asyncio.gather(*map(add, range(5)))
        batches.add([])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        batches.add([8])
        batches.end()
        assert given == [[0, 1, 2, 3, 4], [8]]
        batches.add([9])

    asyncio.run(main())
    assert given == [[0, 1, 2, 3, 4], [8], [9]]


def test_a_loop_that_died_in_its_iteration_leaves_nothing_to_the_next(
    batches: LoopBatches[int], given: list[list[int]]
) -> None:
    async def add(number: int) -> None:
        batches.add([number])

    died = asyncio.new_event_loop()
    died.call_soon(batches.add, [1])
    died.call_soon(died.stop)
    died.run_forever()
    died.close()
    asyncio.run(add(2))
    assert given == [[2]]


def test_an_iteration_within_another_loops_keeps_to_itself(
    batches: LoopBatches[int], given: list[list[int]]
) -> None:
    async def add(number: int) -> None:
        batches.add([number])
        await asyncio.sleep(0)

    async def main() -> None:
        batches.add([1])
        outer = asyncio.get_running_loop()
        inner = asyncio.new_event_loop()
        asyncio._set_running_loop(None)  # as libraries that nest event loops in notebooks do
        inner.run_until_complete(add(2))
        asyncio._set_running_loop(outer)
        inner.close()

    asyncio.run(main())
    assert sorted(given) == [[1], [2]]


def test_single_asks_of_one_gather_enter_one_step(lm: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    submit = lm._loaded.engine.submit

    def counted(requests: Any) -> Any:
        sizes.append(len(requests))
        return submit(requests)

    monkeypatch.setattr(lm._loaded.engine, "submit", counted)

    async def main() -> None:
        await asyncio.gather(*(lm.next_token_logprobs([3, 4, number]) for number in range(5, 35)))

    asyncio.run(main())
    assert sizes == [30]


def test_a_reset_meets_the_asks_of_its_own_iteration(new_lm: Callable[..., AsyncLM]) -> None:
    async def main(lm: AsyncLM) -> None:
        ask = asyncio.create_task(lm.next_token_logprobs([5, 6]))
        await asyncio.sleep(0)
        lm.reset_async_queries()
        with pytest.raises(RequestAbortedError):
            await asyncio.wait_for(ask, LIMIT_S)

    with new_lm(timeout=2 * LIMIT_S) as lm:  # otherwise the row may be ready before the reset
        asyncio.run(main(lm))


def test_asks_of_the_iteration_in_which_it_is_cleaned_up_end_in_an_error(
    new_lm: Callable[..., AsyncLM],
) -> None:
    async def main() -> None:
        lm = new_lm()
        ask = asyncio.create_task(lm.next_token_logprobs([5, 6]))
        await asyncio.sleep(0)
        lm.close()
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(ask, LIMIT_S)

    asyncio.run(main())


def test_sync_asks_and_batches_start_at_once_whatever_the_timeout(new_lm: Callable[..., AsyncLM]) -> None:
    with new_lm(timeout=2 * LIMIT_S, batch_size=1000) as lm:
        asked: list[Callable[[], Any]] = [
            lambda: lm.next_token_logprobs_sync([5, 6]),
            lambda: lm.next_token_logprobs_sync([5, 6], use_cache=False),
            lambda: lm.batch_next_token_logprobs_sync([[5, 7], [5, 8]]),
            lambda: asyncio.run(lm.batch_next_token_logprobs([[5, 9], [5, 10]])),
            lambda: asyncio.run(lm.trie_logprobs([[6, 9], [6, 10]])),
        ]
        start = time.monotonic()
        for ask in asked:
            ask()
        assert time.monotonic() - start < LIMIT_S


def test_batch_size_counts_waiting_asks_though_equal_ones_share_a_row(
    new_lm: Callable[..., AsyncLM],
) -> None:
    async def main(lm: AsyncLM) -> None:
        await asyncio.wait_for(asyncio.gather(*(lm.next_token_logprobs([5, 6]) for _ in range(20))), LIMIT_S)

    with new_lm(timeout=2 * LIMIT_S, batch_size=20) as lm:
        asyncio.run(main(lm))


def test_an_ask_without_the_cache_takes_no_kept_row_and_keeps_none(lm: AsyncLM) -> None:
    fresh = lm.next_token_logprobs_sync([5, 6], use_cache=False)
    kept = lm.next_token_logprobs_sync([5, 6])
    assert kept is not fresh
    assert lm.next_token_logprobs_sync([5, 6]) is kept
    again = lm.next_token_logprobs_sync([5, 6], use_cache=False)
    assert again is not kept
    np.testing.assert_allclose(again, kept, atol=5e-5)
    both = lm.batch_next_token_logprobs_sync([[5, 6], [7, 8]], use_cache=False)
    np.testing.assert_allclose(both[0], kept, atol=5e-5)
    assert len(lm._cache) == 1
