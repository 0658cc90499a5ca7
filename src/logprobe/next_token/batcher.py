"""`Batcher`: concurrent asks for rows → prefixes whose rows are begun, each distinct one once.

All of it happens on the loop of a `LoopThread`, but the gathering of what one iteration of a caller's loop
asks, so that no event loop of a caller is ever needed to finish another caller's ask: loops may come, die and
be cancelled as they like.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, final

from logprobe.errors import EngineClosedError, LogprobeError, RequestAbortedError, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logprobe.engine.backends.bridge import LoopThread
    from logprobe.next_token.rows import Prefix, Row, RowCache
    from logprobe.next_token.source import BegunRow, RowSource

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class LoopBatch(Generic[T]):
    """What was gathered since the event loop's iteration began."""

    loop: asyncio.AbstractEventLoop
    items: list[T] = field(default_factory=list)


@final
class LoopBatches(Generic[T]):
    """Gathers items by event loop; `hand_over` gets those of one iteration at its end, in their order."""

    def __init__(self, hand_over: Callable[[list[T]], None]) -> None:
        self._hand_over = hand_over
        self._here = threading.local()  # `batch`: the one that is open in this thread, or None

    def add(self, items: Iterable[T]) -> None:
        """Gather items in the running event loop's iteration."""
        loop = asyncio.get_running_loop()
        batch: LoopBatch[T] | None = getattr(self._here, "batch", None)
        # One of another loop was cut off with it, or ends by its own callback.
        if batch is None or batch.loop is not loop:
            batch = self._here.batch = LoopBatch(loop)
            loop.call_soon(self._end, batch)
        batch.items.extend(items)

    def end(self) -> None:
        """Hand over at once what this thread has gathered."""
        batch: LoopBatch[T] | None = getattr(self._here, "batch", None)
        if batch is not None:
            self._end(batch)

    def _end(self, batch: LoopBatch[T]) -> None:
        if getattr(self._here, "batch", None) is batch:
            self._here.batch = None
        items, batch.items = batch.items, []
        if items:
            self._hand_over(items)


def check_batching(*, batch_size: object = 1, timeout: object = 0) -> None:
    """Refuse a batch or a wait that cannot be.

    Raises:
        ParameterError: naming the one at fault.
    """
    is_count = isinstance(batch_size, int) and batch_size >= 1
    require(is_count, "batch_size", f"must be a positive number of asks, got {batch_size!r}")
    is_time = isinstance(timeout, int | float) and 0 <= timeout < threading.TIMEOUT_MAX
    require(is_time, "timeout", f"must be a number of seconds, 0 or more, got {timeout!r}")


Waiter: TypeAlias = "Future[Row]"


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One caller's wish for one row."""

    prefix: Prefix
    waiter: Waiter
    is_urgent: bool  # whoever asks asks nothing more until it is there: a wait would gather nothing
    uses_cache: bool  # the rows that are kept


@dataclass(eq=False, slots=True)
class Computation:
    """One row on its way, and all who wait for it."""

    prefix: Prefix
    waiters: list[Waiter] = field(default_factory=list)
    is_kept: bool = False  # in the cache, once it is there
    begun: BegunRow | None = None  # None while it is held


@final
class Batcher:
    """Begins rows: at once while the source works, else once `batch_size` wait or `timeout_s` passed.

    Both may be changed at any time, for asks that come then.
    """

    def __init__(
        self, source: RowSource, cache: RowCache, bridge: LoopThread, *, batch_size: int, timeout_s: float
    ) -> None:
        self._source = source
        self._cache = cache
        self._bridge = bridge
        self.batch_size = batch_size
        self.timeout_s = timeout_s
        self._gathered: LoopBatches[Ask] = LoopBatches(self._send)
        # All below belongs to the bridge's loop.
        self._in_flight: dict[Prefix, Computation] = {}
        self._held: list[Computation] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed: LogprobeError | None = None

    def ask(
        self, prefixes: Iterable[Prefix], *, is_urgent: bool = False, uses_cache: bool = True
    ) -> list[Waiter]:
        """Ask for the rows of prefixes, in any event loop; each waiter ends in a row or an error."""
        asks = [Ask(prefix, Future(), is_urgent, uses_cache) for prefix in prefixes]
        self._gathered.add(asks)
        return [ask.waiter for ask in asks]

    def reset(self) -> None:
        """End every ask in flight with `RequestAbortedError`."""
        self._gathered.end()  # what was asked before the reset must meet it
        self._bridge.post(self._end_all, RequestAbortedError("the ask was given up by a reset"))

    def close(self) -> None:
        """End every ask, those in flight and those that still come, with `EngineClosedError`."""
        self._bridge.post(self._close)

    def _close(self) -> None:
        self._closed = EngineClosedError("this model was cleaned up; make a new one")
        self._end_all(self._closed)

    def _send(self, asks: Sequence[Ask]) -> None:
        try:
            self._bridge.post(self._arrive, asks)
        except EngineClosedError as error:
            for ask in asks:
                _give(ask.waiter, error)

    def _arrive(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self._accept(ask)
        if self._closed is not None:
            self._end_all(self._closed)
        elif self._source.is_busy or any(ask.is_urgent for ask in asks) or self._is_full():
            self._start()
        elif self._held and self._timer is None:
            # Armed by the first ask and never again until it fires: later asks cannot push it back.
            self._timer = asyncio.get_running_loop().call_later(self.timeout_s, self._start)

    def _is_full(self) -> bool:
        """Whether `batch_size` asks wait; equal ones share a row, and count each."""
        waiting = (not waiter.cancelled() for computation in self._held for waiter in computation.waiters)
        return sum(waiting) >= self.batch_size

    def _accept(self, ask: Ask) -> None:
        prefix = ask.prefix
        row = self._cache.get(prefix) if ask.uses_cache else None  # it may have come since the caller looked
        if row is not None:
            _give(ask.waiter, row)
            return
        computation = self._in_flight.get(prefix)
        if computation is None:
            computation = self._in_flight[prefix] = Computation(prefix)
            self._held.append(computation)
        computation.is_kept |= ask.uses_cache
        computation.waiters.append(ask.waiter)
        ask.waiter.add_done_callback(partial(self._on_done, computation))

    def _start(self) -> None:
        held = self._take_held()
        if held:
            self._begin(held)

    def _take_held(self) -> list[Computation]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        return held

    def _begin(self, computations: Sequence[Computation]) -> None:
        try:
            rows = self._source.begin([computation.prefix for computation in computations])
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            if len(computations) == 1:
                self._end(computations[0], error)
                return
            for computation in computations:  # none was begun: find the ones at fault
                self._begin([computation])
            return
        for computation, begun in zip(computations, rows, strict=True):
            computation.begun = begun
            begun.add_done_callback(partial(self._on_row, computation))

    def _on_row(self, computation: Computation, begun: BegunRow) -> None:
        if begun.cancelled():
            return  # nobody waits any more
        error = begun.exception()
        if isinstance(error, Exception):
            self._end(computation, error)
            return
        # Other weights may have taken over since it was asked: it is kept as what it is.
        prefix, row = begun.result()
        row = row.view()  # a view of a read-only array cannot be made writable again
        if computation.is_kept:
            self._cache.put(prefix, row)
        self._end(computation, row)

    def _end(self, computation: Computation, outcome: Row | Exception) -> None:
        if self._in_flight.get(computation.prefix) is computation:
            del self._in_flight[computation.prefix]
        waiters, computation.waiters = computation.waiters, []
        for waiter in waiters:
            _give(waiter, outcome)

    def _end_all(self, error: LogprobeError) -> None:
        self._take_held()
        for computation in list(self._in_flight.values()):
            _give_up(computation)
            self._end(computation, error)

    def _on_done(self, computation: Computation, waiter: Waiter) -> None:
        """Called in whatever thread a waiter ended, or gave up, in."""
        if not waiter.cancelled():
            return
        try:
            self._bridge.post(self._leave, computation)
        except EngineClosedError:
            return  # and with it every computation has ended

    def _leave(self, computation: Computation) -> None:
        """Give a row up once nobody waits for it any more."""
        is_wanted = not all(waiter.cancelled() for waiter in computation.waiters)
        if is_wanted or self._in_flight.get(computation.prefix) is not computation:
            return
        del self._in_flight[computation.prefix]
        if computation.begun is None:
            self._held.remove(computation)
        _give_up(computation)


def _give_up(computation: Computation) -> None:
    if computation.begun is not None:
        computation.begun.cancel()


def _give(waiter: Waiter, outcome: Row | Exception) -> None:
    if not waiter.set_running_or_notify_cancel():
        return  # its owner gave it up
    if isinstance(outcome, Exception):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)


def shut_down(batcher: Batcher, bridge: LoopThread, source: RowSource | None) -> None:
    """End every ask, the source if it is ours, and the bridge."""
    batcher.close()
    if source is not None:
        source.close()
    bridge.close()


def shut_down_elsewhere(batcher: Batcher, bridge: LoopThread, source: RowSource | None) -> None:
    """`shut_down` on a thread of its own, since the object may be dropped on any."""
    threading.Thread(target=shut_down, args=(batcher, bridge, source), name="logprobe-cleanup").start()
