"""`Batcher`: batch concurrent row requests and compute each distinct prefix once.

Requests made in one iteration of a caller's event loop are collected on that loop; everything else runs on
the loop of a `LoopThread`. A request therefore never depends on another caller's event loop, which may be
closed or cancelled at any time.
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
    """Items collected in the current iteration of an event loop."""

    loop: asyncio.AbstractEventLoop
    items: list[T] = field(default_factory=list)


@final
class LoopBatches(Generic[T]):
    """Collect items per event loop; when the loop's iteration ends, call `hand_over` with them, in order."""

    def __init__(self, hand_over: Callable[[list[T]], None]) -> None:
        self._hand_over = hand_over
        self._here = threading.local()  # `batch`: the open batch of this thread, or None

    def add(self, items: Iterable[T]) -> None:
        """Add items to the batch for the current iteration of the running event loop."""
        loop = asyncio.get_running_loop()
        batch: LoopBatch[T] | None = getattr(self._here, "batch", None)
        # A batch of another loop was lost with that loop, or will be handed over by its callback.
        if batch is None or batch.loop is not loop:
            batch = self._here.batch = LoopBatch(loop)
            loop.call_soon(self._end, batch)
        batch.items.extend(items)

    def end(self) -> None:
        """Hand over the items collected on this thread immediately."""
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
    """Validate the batch size and the timeout.

    Raises:
        ParameterError: the batch size or the timeout is out of range.
    """
    is_count = isinstance(batch_size, int) and batch_size >= 1
    require(is_count, "batch_size", f"must be a positive number of requests, got {batch_size!r}")
    is_time = isinstance(timeout, int | float) and 0 <= timeout < threading.TIMEOUT_MAX
    require(is_time, "timeout", f"must be a number of seconds, 0 or more, got {timeout!r}")


Waiter: TypeAlias = "Future[Row]"


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A request for one row by one caller."""

    prefix: Prefix
    waiter: Waiter
    is_urgent: bool  # start immediately: the caller sends nothing more until the row arrives
    uses_cache: bool  # read and write the row cache


@dataclass(eq=False, slots=True)
class Computation:
    """A row being computed, and the requests that wait for it."""

    prefix: Prefix
    waiters: list[Waiter] = field(default_factory=list)
    is_kept: bool = False  # if True, the row is put into the cache
    begun: BegunRow | None = None  # None until the source has started it


@final
class Batcher:
    """Collect row requests and start them together, computing each distinct prefix once.

    Requests start immediately if the source is busy or a request is urgent. Otherwise, they start when
    `batch_size` requests wait, or `timeout_s` seconds after the first request. Both limits can be changed at
    any time and apply to later requests.
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
        # Everything below is accessed on the bridge's loop only.
        self._in_flight: dict[Prefix, Computation] = {}
        self._held: list[Computation] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed: LogprobeError | None = None

    def ask(
        self, prefixes: Iterable[Prefix], *, is_urgent: bool = False, uses_cache: bool = True
    ) -> list[Waiter]:
        """Request the rows of prefixes, from any event loop; return one future of a row per prefix."""
        asks = [Ask(prefix, Future(), is_urgent, uses_cache) for prefix in prefixes]
        self._gathered.add(asks)
        return [ask.waiter for ask in asks]

    def reset(self) -> None:
        """Abort all requests in flight with `RequestAbortedError`."""
        self._gathered.end()  # requests made before the reset must be aborted, too
        self._bridge.post(self._end_all, RequestAbortedError("the request was aborted by a reset"))

    def close(self) -> None:
        """Fail all requests, current and future, with `EngineClosedError`."""
        self._bridge.post(self._close)

    def _close(self) -> None:
        self._closed = EngineClosedError("this model was closed; make a new one")
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
            # The first request starts the timer, and later ones do not restart it, so they cannot delay it.
            self._timer = asyncio.get_running_loop().call_later(self.timeout_s, self._start)

    def _is_full(self) -> bool:
        """Return True if at least `batch_size` requests wait; equal requests count separately."""
        waiting = (not waiter.cancelled() for computation in self._held for waiter in computation.waiters)
        return sum(waiting) >= self.batch_size

    def _accept(self, ask: Ask) -> None:
        prefix = ask.prefix
        # the row may have arrived since the caller looked
        row = self._cache.get(prefix) if ask.uses_cache else None
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
        except Exception as error:  # noqa: BLE001 - the waiters get the error, whatever it is
            if len(computations) == 1:
                self._end(computations[0], error)
                return
            # none was started: start one at a time, so that only the invalid ones fail
            for computation in computations:
                self._begin([computation])
            return
        for computation, begun in zip(computations, rows, strict=True):
            computation.begun = begun
            begun.add_done_callback(partial(self._on_row, computation))

    def _on_row(self, computation: Computation, begun: BegunRow) -> None:
        if begun.cancelled():
            return  # no request waits for it
        error = begun.exception()
        if isinstance(error, Exception):
            self._end(computation, error)
            return
        # Use the prefix in the result: the weights may have been replaced since the request.
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
        """If a waiter was cancelled, report that to the bridge; runs on the thread that ended the waiter."""
        if not waiter.cancelled():
            return
        try:
            self._bridge.post(self._leave, computation)
        except EngineClosedError:
            return  # every computation has ended with the bridge

    def _leave(self, computation: Computation) -> None:
        """Cancel a computation if no request waits for its row any more."""
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
        return  # its caller cancelled it
    if isinstance(outcome, Exception):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)


def shut_down(batcher: Batcher, bridge: LoopThread, source: RowSource | None) -> None:
    """Close the batcher, the source (None if the caller owns it), and the bridge."""
    batcher.close()
    if source is not None:
        source.close()
    bridge.close()


def shut_down_elsewhere(batcher: Batcher, bridge: LoopThread, source: RowSource | None) -> None:
    """Run `shut_down` on a new thread, because the garbage collector may call this on any thread."""
    threading.Thread(target=shut_down, args=(batcher, bridge, source), name="logprobe-cleanup").start()
