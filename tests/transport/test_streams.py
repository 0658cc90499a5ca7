"""`RequestStreams`: order, exactly-once delivery, bounds, and isolation of slow readers."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from logprobe.errors import ParameterError
from logprobe.transport.streams import Parcel, RequestStreams
from refusals import raises

LIMIT_S = 120  # generous, also for a busy machine


class Source:
    """Streams, and the pauses and resumptions reported to their source."""

    def __init__(self, buffer_size: int) -> None:
        self.told: list[str] = []
        self.rows: RequestStreams[int] = RequestStreams(
            buffer_size,
            pause=lambda name: self.told.append(f"pause {name}"),
            resume=lambda name: self.told.append(f"resume {name}"),
        )

    def add(self, name: str, *numbers: int) -> list[str]:
        return self.rows.add_many(Parcel(name, number) for number in numbers)


def test_a_reader_gets_a_buffer_at_a_time_and_its_source_is_paused_meanwhile() -> None:
    source = Source(3)
    source.rows.open("a")
    source.rows.open("b")
    source.add("a", *range(7))  # a source that is slow to pause
    source.add("b", 9)
    assert source.told == ["pause a"]

    async def read() -> list[list[int]]:
        stream = source.rows.stream("a")
        taken = [await anext(stream) for _ in range(3)]
        assert source.told == ["pause a", "resume a"]
        await stream.aclose()
        return taken

    assert asyncio.run(read()) == [[0, 1, 2], [3, 4, 5], [6]]
    assert (source.rows.num_waiting("a"), source.rows.num_waiting("b")) == (0, 1)


def test_a_bound_of_ones_own_is_for_one_request() -> None:
    source = Source(2)

    async def read() -> list[int]:
        stream = source.rows.stream("a", buffer_size=4)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        source.add("a", 0, 1, 2)
        assert source.told == []
        found = await first
        await stream.aclose()
        return found

    assert asyncio.run(read()) == [0, 1, 2]


def test_a_reader_of_many_rows_is_woken_once_they_wait_or_something_is_urgent() -> None:
    source = Source(100)

    async def read() -> list[list[int]]:
        stream = source.rows.stream("a", min_rows=3)
        found = []
        for parcels in (
            [Parcel("a", n) for n in range(3)],
            [Parcel("a", 3), Parcel("a", 4, 0, is_urgent=True)],
        ):
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            for parcel in parcels[:-1]:
                source.rows.add_many([parcel])
                for _ in range(3):
                    await asyncio.sleep(0)
                assert not waiting.done()
            source.rows.add_many(parcels[-1:])
            found.append(await waiting)
        await stream.aclose()
        return found

    assert asyncio.run(read()) == [[0, 1, 2], [3, 4]]


def test_what_nobody_opened_or_somebody_left_is_dropped() -> None:
    source = Source(2)
    assert source.add("a", 1) == []
    assert source.rows.num_waiting("a") == 0
    source.rows.open("a")
    source.add("a", 1, 2)
    source.rows.unregister("a")
    source.rows.unregister("a")
    source.add("a", 3)
    assert source.rows.num_waiting("a") == 0
    assert source.told == ["pause a", "resume a"]


def test_two_readers_of_one_request_are_refused() -> None:
    source = Source(2)
    source.rows.open("a")
    source.add("a", 1)

    async def read() -> None:
        stream = source.rows.stream("a")
        assert await anext(stream) == [1]
        with raises(ParameterError, parameter="req_id"):
            await anext(source.rows.stream("a"))
        await stream.aclose()

    asyncio.run(read())


def test_readers_whose_event_loop_was_closed_are_named() -> None:
    source, loop = Source(2), asyncio.new_event_loop()
    stream = source.rows.stream("a")
    source.rows.open("a")
    source.add("a", 0)
    thread = threading.Thread(target=lambda: loop.run_until_complete(anext(stream)))
    thread.start()
    thread.join(LIMIT_S)
    loop.close()
    assert source.add("a", 1) == ["a"]
    source.rows.unregister("a")
    assert source.add("a", 1) == []


def test_the_last_that_a_source_hears_is_true() -> None:
    """The reader takes rows while the source is being notified of the pause: it must not stay paused."""
    told: list[str] = []
    is_telling, go = threading.Event(), threading.Event()

    def pause(name: str) -> None:
        is_telling.set()
        assert go.wait(LIMIT_S)
        told.append(f"pause {name}")

    rows: RequestStreams[int] = RequestStreams(
        1, pause=pause, resume=lambda name: told.append(f"resume {name}")
    )
    rows.open("a")
    is_taken = threading.Event()

    async def read() -> list[int]:
        stream = rows.stream("a")
        items = await anext(stream)
        await stream.aclose()
        return items

    with ThreadPoolExecutor(2) as pool:
        adding = pool.submit(rows.add_many, [Parcel("a", 0)])
        assert is_telling.wait(LIMIT_S)
        reading = pool.submit(asyncio.run, read())
        while rows.num_waiting("a"):
            is_taken.wait(0.001)
        go.set()
        adding.result(LIMIT_S)
        assert reading.result(LIMIT_S) == [0]
    assert told == ["pause a", "resume a"]


@pytest.mark.parametrize("buffer_size", [0, -1])
def test_a_bound_below_one_is_refused(buffer_size: int) -> None:
    with raises(ParameterError, parameter="buffer_size"):
        Source(buffer_size)
