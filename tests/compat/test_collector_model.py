"""The collector against a model of lists: under any operations, rows arrive in order and exactly once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from logprobe.compat.logprobs_processor import StreamingLogprobsCollector
from logprobe.errors import BusyError
from logprobe.transport.streams import Parcel

NAMES = st.sampled_from(["a", "b", "c"])
SIZE = 3
MAX_ROWS = 5  # per item: more than a buffer holds


class BrokenConsumerError(Exception):
    """Raised by a test's callback."""


class Item:
    """An added item: its request, its number, and how many rows it counts as."""

    def __init__(self, number: int, num_rows: int) -> None:
        self.number, self.num_rows = number, num_rows


def num_rows(items: list[Item]) -> int:
    return sum(item.num_rows for item in items)


class WaitingSource(RuleBasedStateMachine):
    """A source that cannot be paused, on one thread, with callback consumers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: StreamingLogprobsCollector[Item] = StreamingLogprobsCollector(SIZE)
        self.added: defaultdict[str, list[Item]] = defaultdict(list)  # since the request was last forgotten
        self.delivered: defaultdict[str, list[Item]] = defaultdict(list)
        self.consumers: dict[str, bool] = {}  # True if the next delivery raises
        self.numbers = iter(range(10**9))

    def waiting(self, name: str) -> list[Item]:
        return self.added[name][len(self.delivered[name]) :]

    def consume(self, name: str, items: list[Item]) -> None:
        assert items
        assert num_rows(items) <= SIZE or len(items) == 1
        self.delivered[name] += items
        assert self.delivered[name] == self.added[name][: len(self.delivered[name])], "order, exactly once"
        if self.consumers[name]:
            raise BrokenConsumerError(name)

    def forget(self, name: str) -> None:
        self.added[name], self.delivered[name] = [], []
        self.consumers.pop(name, None)

    def expect(self, name: str, work: Any, *, is_due: bool) -> None:
        """Run an operation that delivers rows if some are due; a consumer that raises ends its request."""
        if is_due and self.consumers.get(name):
            with pytest.raises(BrokenConsumerError):
                work()
            self.forget(name)
        else:
            work()

    @rule(name=NAMES, count=st.integers(0, MAX_ROWS))
    def add(self, name: str, count: int) -> None:
        item = Item(next(self.numbers), count)
        waiting = num_rows(self.waiting(name))
        if waiting >= SIZE:
            assert name not in self.consumers
            with pytest.raises(BusyError, match=f"'{name}': {waiting} rows are pending"):
                self.rows.add(name, item, num_rows=count)
            return
        self.added[name].append(item)
        is_due = name in self.consumers and waiting + count >= SIZE
        self.expect(name, lambda: self.rows.add(name, item, num_rows=count), is_due=is_due)

    @precondition(lambda self: len(self.consumers) < 3)
    @rule(data=st.data(), is_broken=st.booleans())
    def register(self, data: Any, is_broken: bool) -> None:
        name = data.draw(st.sampled_from(sorted({"a", "b", "c"} - self.consumers.keys())))
        self.consumers[name] = is_broken
        is_due = num_rows(self.waiting(name)) >= SIZE
        self.expect(
            name,
            lambda: self.rows.register_callback(name, lambda items: self.consume(name, items)),
            is_due=is_due,
        )

    @rule(name=NAMES)
    def flush(self, name: str) -> None:
        is_due = name in self.consumers and bool(self.waiting(name))
        self.expect(name, lambda: self.rows.flush(name), is_due=is_due)
        if name in self.consumers:
            assert not self.waiting(name)

    @rule()
    def flush_all(self) -> None:
        broken = [name for name, is_broken in self.consumers.items() if is_broken and self.waiting(name)]
        if broken:
            with pytest.raises(BrokenConsumerError):
                self.rows.flush_all()
        else:
            self.rows.flush_all()
        for name in broken:
            self.forget(name)
        assert not any(map(self.waiting, self.consumers))

    @rule(name=NAMES)
    def unregister(self, name: str) -> None:
        self.rows.unregister(name)
        self.forget(name)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.consumers)))
        is_due = bool(self.waiting(name))
        self.expect(name, lambda: self.rows.finish(name), is_due=is_due)
        assert not self.waiting(name)
        self.forget(name)

    @invariant()
    def what_waits_is_bounded(self) -> None:
        for name in "abc":
            waiting = num_rows(self.waiting(name))
            assert self.rows.num_waiting(name) == waiting
            assert waiting < SIZE + MAX_ROWS


class PausedSource(RuleBasedStateMachine):
    """A source that respects pauses, and readers of streams, one step of either at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.paused: set[str] = set()
        self.rows: StreamingLogprobsCollector[Item] = StreamingLogprobsCollector(
            SIZE, pause=self.pause, resume=self.resume
        )
        self.streams: dict[str, Any] = {}
        self.added: defaultdict[str, list[Item]] = defaultdict(list)
        self.read: defaultdict[str, list[Item]] = defaultdict(list)
        self.numbers = iter(range(10**9))

    def pause(self, name: str) -> None:
        assert name not in self.paused, "told twice"
        self.paused.add(name)

    def resume(self, name: str) -> None:
        assert name in self.paused, "told twice"
        self.paused.discard(name)

    def teardown(self) -> None:
        for name in list(self.streams):
            self.leave(name)
        self.loop.close()

    def leave(self, name: str) -> None:
        self.loop.run_until_complete(self.streams.pop(name).aclose())
        self.added[name], self.read[name] = [], []

    def waiting(self, name: str) -> int:
        return num_rows(self.added[name]) - num_rows(self.read[name])

    @rule(batch=st.lists(st.tuples(NAMES, st.integers(0, 2)), max_size=6))
    def add(self, batch: list[tuple[str, int]]) -> None:
        """Run a step of the source: paused requests add nothing, rows of unopened streams are dropped."""
        parcels = [
            Parcel(name, Item(next(self.numbers), count), count)
            for name, count in batch
            if name not in self.paused
        ]
        assert self.rows.add_many(parcels) == []
        for parcel in parcels:
            if parcel.req_id in self.streams:
                self.added[parcel.req_id].append(parcel.item)

    @precondition(lambda self: len(self.streams) < 3)
    @rule(data=st.data())
    def follow(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted({"a", "b", "c"} - self.streams.keys())))
        self.rows.open(name)
        self.streams[name] = self.rows.stream(name)

    @precondition(lambda self: any(self.added[name] != self.read[name] for name in self.streams))
    @rule(data=st.data())
    def take(self, data: Any) -> None:
        ready = [name for name in self.streams if self.added[name] != self.read[name]]
        name = data.draw(st.sampled_from(sorted(ready)))
        items = self.loop.run_until_complete(anext(self.streams[name]))
        assert num_rows(items) <= SIZE or len(items) == 1
        self.read[name] += items
        assert self.read[name] == self.added[name][: len(self.read[name])], "order, exactly once"

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.streams)))
        if self.read[name]:
            self.leave(name)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), is_failed=st.booleans())
    def finish(self, data: Any, is_failed: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.streams)))
        self.rows.finish(name, BrokenConsumerError(name) if is_failed else None)

        async def rest() -> None:
            async for items in self.streams[name]:
                self.read[name] += items

        if is_failed:
            with pytest.raises(BrokenConsumerError):
                self.loop.run_until_complete(rest())
        else:
            self.loop.run_until_complete(rest())
        assert self.read[name] == self.added[name]
        del self.streams[name]
        self.added[name], self.read[name] = [], []

    @invariant()
    def a_request_is_paused_while_its_buffer_is_full(self) -> None:
        for name in "abc":
            assert (name in self.paused) == (self.waiting(name) >= SIZE)
            assert self.rows.num_waiting(name) == self.waiting(name)


for machine in (WaitingSource, PausedSource):
    machine.TestCase.settings = settings(
        max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
    )
TestWaitingSource = WaitingSource.TestCase
TestPausedSource = PausedSource.TestCase
