"""What one event loop asks in one turn goes on together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.errors import EngineClosedError, RequestAbortedError
from logprobe.next_token.desk import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe import AsyncLM


@pytest.fixture
def given() -> list[list[int]]:
    return []


@pytest.fixture
def turns(given: list[list[int]]) -> Turns[int]:
    return Turns(given.append)


def test_items_of_one_turn_are_handed_over_once_in_order(turns: Turns[int], given: list[list[int]]) -> None:
    async def add(number: int) -> None:
        turns.add([number])

    async def main() -> None:
        await asyncio.gather(*map(add, range(5)))
        turns.add([])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turns.add([8])
        turns.end()
        assert given == [[0, 1, 2, 3, 4], [8]]
        turns.add([9])

    asyncio.run(main())
    assert given == [[0, 1, 2, 3, 4], [8], [9]]


def test_a_loop_that_died_in_its_turn_leaves_nothing_to_the_next(
    turns: Turns[int], given: list[list[int]]
) -> None:
    async def add(number: int) -> None:
        turns.add([number])

    died = asyncio.new_event_loop()
    died.call_soon(turns.add, [1])
    died.call_soon(died.stop)
    died.run_forever()
    died.close()
    asyncio.run(add(2))
    assert given == [[2]]


def test_a_turn_within_another_loops_turn_keeps_to_itself(turns: Turns[int], given: list[list[int]]) -> None:
    async def add(number: int) -> None:
        turns.add([number])
        await asyncio.sleep(0)

    async def main() -> None:
        turns.add([1])
        outer = asyncio.get_running_loop()
        inner = asyncio.new_event_loop()
        asyncio._set_running_loop(None)  # what those do who nest event loops in a notebook
        inner.run_until_complete(add(2))
        asyncio._set_running_loop(outer)
        inner.close()

    asyncio.run(main())
    assert sorted(given) == [[1], [2]]


def test_single_asks_of_one_gather_enter_one_step(lm: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    submit: Callable[..., None] = lm._engine.submit

    def counted(requests: Any) -> None:
        sizes.append(len(requests))
        submit(requests)

    monkeypatch.setattr(lm._engine, "submit", counted)

    async def main() -> None:
        await asyncio.gather(*(lm.next_token_logprobs([3, 4, number]) for number in range(5, 35)))

    asyncio.run(main())
    assert sizes == [30]


def test_a_reset_meets_the_asks_of_its_own_turn(new_lm: Callable[..., AsyncLM]) -> None:
    async def main(lm: AsyncLM) -> None:
        ask = asyncio.create_task(lm.next_token_logprobs([5, 6]))
        await asyncio.sleep(0)
        lm.reset_async_queries()
        with pytest.raises(RequestAbortedError):
            await asyncio.wait_for(ask, 10)

    with new_lm(timeout=60.0) as lm:  # else the row may be there before the reset
        asyncio.run(main(lm))


def test_asks_of_the_turn_in_which_it_is_cleaned_up_end_in_an_error(new_lm: Callable[..., AsyncLM]) -> None:
    async def main() -> None:
        lm = new_lm()
        ask = asyncio.create_task(lm.next_token_logprobs([5, 6]))
        await asyncio.sleep(0)
        lm.cleanup()
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(ask, 10)

    asyncio.run(main())
