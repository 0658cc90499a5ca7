"""Limits on the work in progress, for all callers together and for each caller."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from logprobe.server import ServerSettings
from logprobe.server.http.errors import ApiError
from logprobe.server.limits import Cost, Limits, NoRoomError

if TYPE_CHECKING:
    from collections.abc import Coroutine


def cost(requests: int, tokens: int = 1) -> Cost:
    return Cost(requests=requests, tokens=tokens, logprob_bytes=0)


def test_one_caller_may_have_all_there_is_and_others_still_a_little() -> None:
    limits = Limits(ServerSettings(max_requests=512))
    hog = limits.admit(cost(512), "hog")
    with pytest.raises(ApiError, match="512 of 512"):
        limits.admit(cost(1), "hog")
    with pytest.raises(ApiError, match="512 of 512"):
        limits.admit(cost(9), "other")
    tickets = [limits.admit(cost(8), f"other{number}") for number in range(8)]
    with pytest.raises(ApiError, match="576 of 512"):
        limits.admit(cost(1), "one more")
    for ticket in (hog, *tickets):
        ticket.release()
        ticket.release()
    assert set(limits.in_use().values()) == {0}
    limits.admit(cost(512), "other0")


def test_a_caller_that_is_small_in_one_way_is_not_let_in_for_another() -> None:
    limits = Limits(ServerSettings(max_requests=64, max_tokens_in_flight=6400))
    limits.admit(cost(1, 6400), "hog")
    with pytest.raises(ApiError, match="tokens"):
        limits.admit(cost(1, 101), "other")
    limits.admit(cost(1, 100), "other")


def test_what_is_beyond_a_limit_is_refused_for_good_whoever_asks() -> None:
    with pytest.raises(ApiError, match="max_requests") as caught:
        Limits(ServerSettings(max_requests=8)).admit(cost(9), "other")
    assert caught.value.status == 400


def run_full(work: Any, **settings: Any) -> Any:
    """Run `work` with the limits and the ticket of a caller that holds all 8 requests; return its result."""

    async def run() -> Any:
        limits = Limits(ServerSettings(max_requests=8, **settings))
        return await work(limits, limits.admit(cost(8), "hog"))

    return asyncio.run(run())


async def begun(*waits: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.sleep(0)
    return tasks


def test_requests_that_wait_are_admitted_in_order_of_arrival() -> None:
    async def work(limits: Limits, hog: Any) -> list[list[bool]]:
        waits = await begun(*(limits.wait(cost(size), "hog") for size in (5, 5, 1)))
        states = []
        held: Any = hog
        for task in waits:
            held.release()
            await asyncio.sleep(0.01)
            states.append([one.done() for one in waits])
            held = await task
        held.release()
        assert limits.in_use()["requests"] == 0
        return states

    # The last one would fit now, but waits its turn behind the one before it.
    assert run_full(work) == [[True, False, False], [True, True, True], [True, True, True]]


def test_a_new_request_does_not_overtake_its_callers_that_wait() -> None:
    async def work(limits: Limits, hog: Any) -> None:
        hog.release()
        first = limits.admit(cost(4), "hog")
        (wait,) = await begun(limits.wait(cost(5), "hog"))
        with pytest.raises(NoRoomError):
            limits.admit(cost(1), "hog")
        limits.admit(cost(4), "other").release()
        limits.admit(cost(0), "hog").release()  # a reply that is ready costs only its bytes
        first.release()
        (await wait).release()

    run_full(work)


def test_callers_that_wait_take_turns() -> None:
    async def work(limits: Limits, hog: Any) -> list[str]:
        order: list[str] = []

        async def one(caller: str) -> None:
            ticket = await limits.wait(cost(8), caller)
            order.append(caller)
            ticket.release()

        tasks = await begun(*(one(caller) for caller in ("hog", "hog", "hog", "other")))
        hog.release()
        await asyncio.gather(*tasks)
        return order

    assert run_full(work) == ["hog", "other", "hog", "hog"]


def test_a_queue_that_is_full_and_a_wait_that_is_over_are_429() -> None:
    async def work(limits: Limits, hog: Any) -> None:
        (wait,) = await begun(limits.wait(cost(1), "hog"))
        for refused in (limits.wait(cost(1), "hog"), wait):
            with pytest.raises(ApiError) as caught:
                await refused
            assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
        hog.release()
        limits.admit(cost(8), "hog").release()

    run_full(work, max_waiting=1, wait_timeout_s=0.1)


def test_what_waits_on_a_closed_event_loop_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(limits: Limits, hog: Any) -> None:
        (waiting,) = await begun(limits.wait(cost(8), "hog"))
        with monkeypatch.context() as closed:
            no_loop = RuntimeError("Event loop is closed")
            closed.setattr(asyncio.get_running_loop(), "call_soon_threadsafe", Mock(side_effect=no_loop))
            hog.release()
        assert limits.in_use()["requests"] == 0
        limits.admit(cost(8), "hog").release()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert limits.in_use()["requests"] == 0

    run_full(work)


@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_request_that_leaves_makes_room_for_the_next(is_admitted: bool) -> None:
    async def work(limits: Limits, hog: Any) -> None:
        first, second = await begun(limits.wait(cost(8), "hog"), limits.wait(cost(1), "hog"))
        if is_admitted:
            hog.release()  # the first has been admitted, but has not resumed yet
            first.cancel()
        else:
            first.cancel()
            hog.release()
        (await second).release()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert limits.in_use()["requests"] == 0

    run_full(work)
