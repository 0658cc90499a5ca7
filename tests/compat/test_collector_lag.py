"""Consumers that lag, raise or never come: their request is paused, and nothing is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.compat.logprobs_processor import StreamingLogprobsCollector
from logprobe.errors import BusyError, ParameterError
from logprobe.transport.streams import Parcel

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 120  # generous, also for a busy machine


def collector(size: int = 100, **told: Any) -> StreamingLogprobsCollector[int]:
    return StreamingLogprobsCollector(size, **told)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


def test_a_lagging_callback_pauses_its_own_request_and_slows_no_other() -> None:
    size, told, go, all_came = 2, [], threading.Event(), threading.Event()
    rows = collector(
        size,
        pause=lambda name: told.append(f"pause {name}"),
        resume=lambda name: told.append(f"resume {name}"),
    )
    found: dict[str, list[int]] = {"slow": [], "quick": []}

    def lag(items: list[int]) -> None:
        assert go.wait(LIMIT_S)
        take("slow", items)

    def take(name: str, items: list[int]) -> None:
        assert len(items) <= size
        found[name] += items
        if [len(rows) for rows in found.values()] == [4, 50]:
            all_came.set()

    rows.register_callback("slow", lag)
    rows.register_callback("quick", lambda items: take("quick", items))
    for number in range(4):
        rows.add("slow", number)
    assert told == ["pause slow"]
    assert rows.num_waiting("slow") == size
    for number in range(50):  # of the other one's own threads each takes two
        rows.add("quick", number)
    rows.flush("quick")
    go.set()
    assert all_came.wait(LIMIT_S)
    assert found == {"slow": list(range(4)), "quick": list(range(50))}
    assert [word for word in told if "slow" in word] == ["pause slow", "resume slow"]


def test_without_a_pause_a_buffer_that_nobody_empties_is_busy() -> None:
    rows = collector(3)
    for number in range(3):
        rows.add("a", number)
    for _ in range(5):
        with pytest.raises(BusyError, match="'a': 3 rows are pending without a consumer"):
            rows.add("a", 3)
    found: list[list[int]] = []
    rows.register_callback("a", found.append)
    rows.add("a", 3)
    rows.finish("a")
    assert found == [[0, 1, 2], [3]]


def test_without_a_pause_who_adds_waits_for_a_consumer_that_lags() -> None:
    rows, began, go = collector(2), threading.Event(), threading.Event()
    found: list[int] = []

    def lag(items: list[int]) -> None:
        began.set()
        assert go.wait(LIMIT_S)
        found.extend(items)

    def fill(numbers: range) -> None:
        for number in numbers:
            rows.add("a", number)

    rows.register_callback("a", lag)
    first = threading.Thread(target=fill, args=(range(2),))
    first.start()
    assert began.wait(LIMIT_S)
    fill(range(2, 4))
    with pytest.raises(BusyError, match="took no row within 0 s"):
        rows.add("a", 4, timeout=0)
    second = threading.Thread(target=fill, args=(range(4, 9),))
    second.start()
    assert rows.num_waiting("a") == 2
    go.set()
    for thread in (first, second):
        thread.join(LIMIT_S)
    rows.flush("a")
    assert found == list(range(9))


def test_without_a_pause_a_stream_on_another_thread_is_waited_for() -> None:
    rows, is_open = collector(2), threading.Event()

    async def read() -> list[int]:
        is_open.set()
        return [number async for items in rows.stream("a") for number in items]

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(asyncio.run, read())
        assert is_open.wait(LIMIT_S)
        for number in range(500):
            while True:
                try:
                    rows.add("a", number, timeout=LIMIT_S)
                    break
                except BusyError:  # the stream was not open yet
                    threading.Event().wait(0.001)
        rows.finish("a")
        assert reading.result(LIMIT_S) == list(range(500))


def test_a_producer_is_not_left_waiting_by_a_reader_whose_loop_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("logprobe.compat.collector.CHECK_S", 0.01)
    rows, loop = collector(1), asyncio.new_event_loop()

    async def open_and_leave() -> None:
        stream = rows.stream("a")
        rows.add("a", 0)
        await anext(stream)
        loop.stream = stream  # type: ignore[attr-defined]  # or it would be closed with its last reference

    thread = threading.Thread(target=lambda: loop.run_until_complete(open_and_leave()))
    thread.start()
    thread.join(LIMIT_S)
    rows.add("a", 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rows.add, "a", 2)
        loop.close()
        with pytest.raises(BusyError):
            waiting.result(LIMIT_S)


def test_a_late_callback_gets_a_buffer_at_a_time() -> None:
    told: list[str] = []
    rows = collector(3, pause=lambda name: told.append(f"pause {name}"), resume=told.append)
    found: list[list[int]] = []
    for number in range(11):  # a source that is slow to pause
        rows.add("a", number)
    assert told == ["pause a"]
    all_came = threading.Event()

    def take(items: list[int]) -> None:
        found.append(items)
        if sum(map(len, found)) == 11:
            all_came.set()

    rows.register_callback("a", take)
    rows.finish("a")
    assert all_came.wait(LIMIT_S)
    assert [len(items) for items in found] == [3, 3, 3, 2]
    assert list(chain.from_iterable(found)) == list(range(11))
    assert told == ["pause a", "a"]


def test_what_a_callback_leaves_of_a_full_buffer_pauses_the_source() -> None:
    told, go, is_over = [], threading.Event(), threading.Event()
    rows = collector(3, pause=lambda name: told.append(f"pause {name}"), resume=lambda _: is_over.set())
    found: list[list[int]] = []

    def lag(items: list[int]) -> None:
        assert go.wait(LIMIT_S)
        found.append(items)

    rows.open("a")
    rows.register_callback("a", lag)
    rows.add_many([Parcel("a", 1, 2), Parcel("a", 2, 5)])  # the second has more rows than the buffer
    until(lambda: told == ["pause a"])
    assert rows.num_waiting("a") == 5
    go.set()
    assert is_over.wait(LIMIT_S)
    until(lambda: found == [[1], [2]])


@pytest.mark.parametrize("has_hook", [True, False])
def test_a_callback_that_raises_on_a_thread_of_its_own_ends_its_request(has_hook: bool) -> None:
    failed: list[tuple[str, str]] = []
    hook = {"fail": lambda name, error: failed.append((name, str(error)))} if has_hook else {}
    rows = collector(1, pause=lambda _: None, resume=lambda _: None, **hook)

    def fail(_: list[int]) -> None:
        raise RuntimeError("broken consumer")

    rows.open("a")
    rows.register_callback("a", fail)
    rows.add_many([Parcel("a", 1)])
    if has_hook:
        until(lambda: failed == [("a", "broken consumer")])
        rows.flush("a")
    else:
        until(lambda: "a" in rows._failures)
        with pytest.raises(RuntimeError, match="broken consumer"):
            rows.add("a", 2)
    assert rows.add_many([Parcel("a", 3)]) == []
    assert rows.num_waiting("a") == 0


def test_who_waits_for_room_hears_of_a_callback_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, began, go = collector(1), threading.Event(), threading.Event()
    wait, waits = rows._room.wait, threading.Event()

    def noted(timeout: float | None = None) -> bool:
        waits.set()  # while holding the lock, which `wait` releases
        return wait(timeout)

    monkeypatch.setattr(rows._room, "wait", noted)

    def fail(_: list[int]) -> None:
        began.set()
        assert go.wait(LIMIT_S)
        raise RuntimeError("broken consumer")

    rows.register_callback("a", fail)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rows.add, "a", 0)
        assert began.wait(LIMIT_S)
        rows.add("a", 1)
        second = pool.submit(rows.add, "a", 2)
        assert waits.wait(LIMIT_S)
        go.set()
        for adding in (first, second):
            with pytest.raises(RuntimeError, match="broken consumer"):
                adding.result(LIMIT_S)
    assert rows.num_waiting("a") == 0


def test_rows_of_a_source_that_cannot_be_paused_come_one_by_one() -> None:
    with pytest.raises(ParameterError, match="give pause and resume"):
        collector().add_many([Parcel("a", 1)])
