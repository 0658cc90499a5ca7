"""`StreamingLogprobsCollector`: order, exactly-once delivery, bounds, and isolation of failing consumers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from logprobe.compat.logprobs_processor import StreamingLogprobsCollector
from logprobe.errors import ParameterError
from logprobe.transport.streams import Parcel


def collector(size: int = 100, **told: Any) -> StreamingLogprobsCollector[int]:
    return StreamingLogprobsCollector(size, **told)


def test_a_callback_gets_full_buffers_and_the_rest_at_a_flush() -> None:
    found: list[list[int]] = []
    rows = collector(3)
    rows.register_callback("a", found.append)
    for number in range(7):
        rows.add("a", number)
    assert found == [[0, 1, 2], [3, 4, 5]]
    rows.flush("a")
    rows.flush("a")
    assert found == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_flush_of_all_reaches_every_request_also_where_one_raises() -> None:
    found: dict[str, list[int]] = {}
    rows = collector()

    def fail(_: list[int]) -> None:
        raise RuntimeError("broken consumer")

    rows.register_callback("a", fail)
    rows.register_callback("b", lambda items: found.update(b=items))
    for name in ("a", "b"):
        rows.add(name, 1)
    with pytest.raises(RuntimeError, match="broken consumer"):
        rows.flush_all()
    assert found == {"b": [1]}
    assert rows.num_waiting("a") == 0
    rows.flush_all()  # the consumer that raised is unregistered


def test_a_callback_may_call_back_into_the_collector() -> None:
    found: list[int] = []
    rows = collector(1)

    def more(items: list[int]) -> None:
        found.extend(items)
        if items[0] < 3:
            rows.add("a", items[0] + 1)

    rows.register_callback("a", more)
    rows.add("a", 0)
    assert found == [0, 1, 2, 3]


def test_rows_added_before_the_consumer_came_wait_for_it() -> None:
    found: list[int] = []
    rows = collector(2)
    rows.add("a", 1)
    rows.register_callback("a", found.extend)
    rows.add("a", 2)
    assert found == [1, 2]


def test_many_threads_lose_nothing_and_keep_each_requests_order() -> None:
    found: dict[str, list[int]] = {str(name): [] for name in range(8)}
    rows = collector(7)
    for name, items in found.items():
        rows.register_callback(name, items.extend)

    def fill(name: str) -> None:
        for number in range(1000):
            rows.add(name, number)

    threads = [threading.Thread(target=fill, args=(name,)) for name in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows.flush_all()
    assert all(items == list(range(1000)) for items in found.values())


def test_a_stream_ends_with_the_error_it_was_given() -> None:
    async def read() -> list[int]:
        rows = collector()
        rows.add("a", 1)
        rows.finish("a", RuntimeError("the engine stopped"))
        stream = rows.stream("a")
        found = await anext(stream)
        with pytest.raises(RuntimeError, match="the engine stopped"):
            await anext(stream)
        return found

    assert asyncio.run(read()) == [1]


def test_two_consumers_of_one_request_are_refused() -> None:
    rows = collector()
    rows.register_callback("a", print)
    with pytest.raises(ParameterError, match="has a consumer already"):
        rows.register_callback("a", print)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_slow_stream_pauses_its_source_and_gets_every_row(size: int) -> None:
    told: list[str] = []
    rows = collector(size, pause=lambda name: told.append(f"pause {name}"), resume=told.append)

    async def read() -> list[int]:
        for number in range(size + 2):
            rows.add("a", number)
        assert told == ["pause a"]
        rows.finish("a")
        return [number async for items in rows.stream("a") for number in items]

    assert asyncio.run(read()) == list(range(size + 2))
    assert told == ["pause a", "a"]


def test_leaving_a_stream_forgets_the_request_and_lets_it_go_on() -> None:
    told: list[str] = []
    rows = collector(1, resume=told.append)

    async def read() -> None:
        rows.add("a", 1)
        stream = rows.stream("a")
        async for _ in stream:
            rows.add("a", 2)
            break
        await stream.aclose()

    asyncio.run(read())
    assert told == ["a", "a"]
    assert rows.num_waiting("a") == 0


class Clock:
    """A clock that tests advance by hand."""

    def __init__(self) -> None:
        self._ticks = asyncio.Condition()
        self.now_s = 0

    async def sleep(self, seconds: int) -> None:
        end = self.now_s + seconds
        async with self._ticks:
            await self._ticks.wait_for(lambda: self.now_s >= end)

    async def tick(self) -> None:
        async with self._ticks:
            self.now_s += 1
            self._ticks.notify_all()
        for _ in range(4):  # loop iterations: a woken reader reads and sleeps again
            await asyncio.sleep(0)


def test_sixty_four_slow_readers_stay_within_their_bound() -> None:
    """A source of three rows per step and a hundred steps a second, with readers of a row per second."""
    size, total, burst = 8, 60, 3
    names = [str(number) for number in range(64)]

    async def read(rows: StreamingLogprobsCollector[int], name: str, clock: Clock) -> list[int]:
        found: list[int] = []
        async for items in rows.stream(name):
            assert len(items) <= size
            for item in items:
                await clock.sleep(1)
                found.append(item)
        return found

    async def run() -> tuple[list[list[int]], int]:
        clock, paused, most = Clock(), set[str](), 0
        rows = collector(size, pause=paused.add, resume=paused.discard)
        readers = [asyncio.create_task(read(rows, name, clock)) for name in names]
        await asyncio.sleep(0)
        left = {name: list(range(total)) for name in names}
        while any(left.values()):
            for _ in range(100):
                going = [name for name in names if left[name] and name not in paused]
                new = {name: [left[name].pop(0) for _ in range(burst)] for name in going}
                rows.add_many(Parcel(name, number) for name, numbers in new.items() for number in numbers)
                most = max(most, *map(rows.num_waiting, names))
            await clock.tick()
        for name in names:
            rows.finish(name)
        while not all(reader.done() for reader in readers):
            await clock.tick()
        return [reader.result() for reader in readers], most

    found, most = asyncio.run(run())
    assert found == [list(range(total))] * 64
    assert size <= most < size + burst


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ParameterError, match="buffer_size"):
        collector(0)
