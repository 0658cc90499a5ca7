"""`StreamingLogprobsCollector`: each request's rows to its own consumer, at that consumer's speed.

Before it: whoever follows the engine. After it: callbacks, or an async stream. It carries rows and reads
none. A request whose consumer lags is paused at the source, so what waits here stays bounded and no other
request is slowed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

T = TypeVar("T")


@dataclass(slots=True)
class _Channel(Generic[T]):
    """What waits for one request's consumer; guarded by the collector's lock."""

    items: list[T] = field(default_factory=list)
    num_rows: int = 0
    callback: Callable[[list[T]], object] | None = None
    delivering: bool = False
    is_paused: bool = False
    is_done: bool = False
    error: BaseException | None = None
    wake: Callable[[], None] | None = None  # tells the async reader, from any thread


class StreamingLogprobsCollector(Generic[T]):
    """Rows in order, exactly once, to callbacks (in batches) or to an async stream (as they come).

    Any thread may add. A callback gets the list of what was added since the last call; it runs outside the
    lock and may call back into the collector. Rows that no consumer has taken yet wait, and their request is
    paused once `buffer_size` rows do.
    """

    def __init__(
        self,
        buffer_size: int = 100,
        *,
        pause: Callable[[str], object] | None = None,
        resume: Callable[[str], object] | None = None,
    ) -> None:
        """Bound each request to `buffer_size` rows waiting.

        `pause` is told a request's id when so many wait, `resume` when its consumer has taken them.

        Raises:
            ParameterError: `buffer_size` is below 1.
        """
        require(buffer_size >= 1, "buffer_size", f"must be at least 1, got {buffer_size}")
        self.buffer_size = buffer_size
        self._pause = pause or _ignore
        self._resume = resume or _ignore
        self._lock = threading.Lock()
        self._channels: defaultdict[str, _Channel[T]] = defaultdict(_Channel)

    def register_callback(self, req_id: str, callback: Callable[[list[T]], object]) -> None:
        """Let `callback` take the request's rows: when `buffer_size` wait, and at each flush.

        A callback that raises ends its request: it is unregistered and the error goes to whoever added.

        Raises:
            ParameterError: the request has a consumer already.
        """
        with self._lock:
            channel = self._channels[req_id]
            is_free = channel.callback is None and channel.wake is None
            require(is_free, "req_id", f"{req_id!r} has a consumer already; unregister it first")
            channel.callback = callback

    def unregister(self, req_id: str) -> None:
        """Forget a request and what waits for it; one that is unknown is no error."""
        with self._lock:
            channel = self._channels.pop(req_id, None)
            was_paused = channel is not None and channel.is_paused
            if channel is not None:
                channel.is_done = True
        if was_paused:
            self._resume(req_id)
        if channel is not None and channel.wake is not None:
            channel.wake()

    def add(self, req_id: str, logprobs: T, *, num_rows: int = 1) -> None:
        """Add what is new of a request: one item that carries `num_rows` rows."""
        with self._lock:
            channel = self._channels[req_id]
            channel.items.append(logprobs)
            channel.num_rows += num_rows
            is_full = channel.num_rows >= self.buffer_size
            has_callback = channel.callback is not None
            must_pause = is_full and not has_callback and not channel.is_paused
            channel.is_paused |= must_pause
            wake = channel.wake
        if must_pause:
            self._pause(req_id)
        if wake is not None:
            wake()
        if is_full and has_callback:
            self.flush(req_id)

    def flush(self, req_id: str) -> None:
        """Hand over now what waits for a request's callback; one without rows or callback is left alone.

        Raises:
            Exception: what the callback raised; the request is unregistered then.
        """
        while (batch := self._take_for_callback(req_id)) is not None:
            callback, items = batch
            try:
                callback(items)
            except BaseException:
                self.unregister(req_id)
                raise
            self._delivered(req_id)

    def flush_all(self) -> None:
        """Flush every request; the first error of a callback is raised once all were flushed."""
        with self._lock:
            names = list(self._channels)
        errors: list[Exception] = []
        for req_id in names:
            try:
                self.flush(req_id)
            except Exception as error:  # noqa: BLE001 - one request's callback must not keep rows from the others
                errors.append(error)
        if errors:
            raise errors[0]

    def finish(self, req_id: str, error: BaseException | None = None) -> None:
        """Say that no more comes: the stream ends after what waits, with `error` if one is given."""
        with self._lock:
            channel = self._channels[req_id]
            channel.is_done, channel.error = True, error
            wake = channel.wake
        if wake is not None:
            wake()
        self.flush(req_id)

    def num_waiting(self, req_id: str) -> int:
        """Rows that the request's consumer has not taken."""
        with self._lock:
            return self._channels[req_id].num_rows if req_id in self._channels else 0

    async def stream(self, req_id: str) -> AsyncGenerator[list[T]]:
        """What was added, each time in one list, until `finish`; leaving early forgets the request.

        Raises:
            ParameterError: the request has a consumer already.
            BaseException: the error that `finish` was given.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        channel = self._open_stream(req_id, partial(_wake, loop, news, threading.get_ident()))
        try:
            while True:
                items, is_done = self._take(req_id, channel)
                if items:
                    yield items
                elif is_done:
                    break
                else:
                    await news.wait()
                    news.clear()
            if channel.error is not None:
                raise channel.error
        finally:
            self.unregister(req_id)

    def _open_stream(self, req_id: str, wake: Callable[[], None]) -> _Channel[T]:
        with self._lock:
            channel = self._channels[req_id]
            if channel.callback is not None or channel.wake is not None:
                raise ParameterError("req_id", f"{req_id!r} has a consumer already")
            channel.wake = wake
            return channel

    def _take(self, req_id: str, channel: _Channel[T]) -> tuple[list[T], bool]:
        with self._lock:
            items, channel.items = channel.items, []
            channel.num_rows = 0
            was_paused, channel.is_paused = channel.is_paused, False
            is_done = channel.is_done
        if was_paused:
            self._resume(req_id)
        return items, is_done

    def _take_for_callback(self, req_id: str) -> tuple[Callable[[list[T]], object], list[T]] | None:
        with self._lock:
            channel = self._channels.get(req_id)
            # While a callback runs, what it or another thread adds waits for it: rows stay in order.
            if channel is None or channel.callback is None or channel.delivering or not channel.items:
                return None
            items, channel.items = channel.items, []
            channel.num_rows = 0
            channel.delivering = True
            return channel.callback, items

    def _delivered(self, req_id: str) -> None:
        with self._lock:
            if req_id in self._channels:
                self._channels[req_id].delivering = False


def _wake(loop: asyncio.AbstractEventLoop, news: asyncio.Event, thread: int) -> None:
    try:
        if threading.get_ident() == thread:
            news.set()  # costs a fraction of what waking a loop from outside costs
        else:
            loop.call_soon_threadsafe(news.set)
    except RuntimeError:  # the reader's loop was closed: nobody is left to be told
        if not loop.is_closed():
            raise


def _ignore(_: str) -> None:
    """Stand in where nothing is to be paused."""
