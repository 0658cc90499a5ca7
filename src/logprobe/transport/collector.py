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
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

T = TypeVar("T")


class Parcel(NamedTuple, Generic[T]):
    """What is new of one request."""

    req_id: str
    item: T
    num_rows: int = 1
    is_urgent: bool = False  # its reader is woken however few rows wait, such as at the end


@dataclass(slots=True)
class _Reader:
    """Who follows a stream: an event of the reader's own loop, set once `min_rows` rows wait."""

    min_rows: int
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    thread: int = field(default_factory=threading.get_ident)


@dataclass(slots=True)
class _Channel(Generic[T]):
    """What waits for one request's consumer; guarded by the collector's lock."""

    buffer_size: int
    items: list[T] = field(default_factory=list)
    num_rows: int = 0
    callback: Callable[[list[T]], object] | None = None
    delivering: bool = False
    is_paused: bool = False
    is_done: bool = False
    error: BaseException | None = None
    reader: _Reader | None = None


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
        self._channels: defaultdict[str, _Channel[T]] = defaultdict(lambda: _Channel(buffer_size))

    def open(self, req_id: str) -> None:
        """Make a request known, so that `add_many` keeps what comes for it before its consumer does."""
        with self._lock:
            _ = self._channels[req_id]

    def register_callback(self, req_id: str, callback: Callable[[list[T]], object]) -> None:
        """Let `callback` take the request's rows: when `buffer_size` wait, and at each flush.

        A callback that raises ends its request: it is unregistered and the error goes to whoever added.

        Raises:
            ParameterError: the request has a consumer already.
        """
        with self._lock:
            channel = self._channels[req_id]
            is_free = channel.callback is None and channel.reader is None
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
        if channel is not None and channel.reader is not None:
            _wake_all([channel.reader])

    def add(self, req_id: str, logprobs: T, *, num_rows: int = 1) -> None:
        """Add what is new of a request: one item that carries `num_rows` rows."""
        with self._lock:
            channel = self._channels[req_id]
            must_pause = self._put(channel, logprobs, num_rows)
            is_full, reader = channel.num_rows >= channel.buffer_size, channel.reader
            has_callback = channel.callback is not None
        if must_pause:
            self._pause(req_id)
        if reader is not None:
            _wake_all([reader])
        if is_full and has_callback:
            self.flush(req_id)

    def add_many(self, parcels: Iterable[Parcel[T]]) -> list[str]:
        """Add what is new of many requests, and wake each event loop once.

        What comes for a request that is unknown, or was forgotten, is dropped. Only streams read it.

        Returns:
            The requests whose readers can never come back, since their event loops were closed.
        """
        woken: dict[str, _Reader] = {}
        paused: list[str] = []
        with self._lock:
            for req_id, item, num_rows, is_urgent in parcels:
                channel = self._channels.get(req_id)
                if channel is None:
                    continue
                if self._put(channel, item, num_rows):
                    paused.append(req_id)
                reader = channel.reader
                if reader is not None and (is_urgent or channel.num_rows >= reader.min_rows):
                    woken[req_id] = reader
        for req_id in paused:
            self._pause(req_id)
        closed = _wake_all(woken.values())
        return [req_id for req_id, reader in woken.items() if reader.loop in closed]

    def _put(self, channel: _Channel[T], item: T, num_rows: int) -> bool:
        """Add to a channel; whether its request must be paused now."""
        channel.items.append(item)
        channel.num_rows += num_rows
        is_full = channel.num_rows >= channel.buffer_size
        must_pause = is_full and channel.callback is None and not channel.is_paused
        channel.is_paused |= must_pause
        return must_pause

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
            reader = channel.reader
        if reader is not None:
            _wake_all([reader])
        self.flush(req_id)

    def num_waiting(self, req_id: str) -> int:
        """Rows that the request's consumer has not taken."""
        with self._lock:
            return self._channels[req_id].num_rows if req_id in self._channels else 0

    async def stream(
        self, req_id: str, *, buffer_size: int | None = None, min_rows: int = 1
    ) -> AsyncGenerator[list[T]]:
        """What was added, each time in one list, until `finish`; leaving early forgets the request.

        `buffer_size` bounds this request in place of the collector's own bound. A reader who needs no step at
        once is woken when `min_rows` rows wait.

        Raises:
            ParameterError: the request has a consumer already.
            BaseException: the error that `finish` was given.
        """
        reader = _Reader(min_rows)
        channel = self._open_stream(req_id, reader, buffer_size)
        try:
            while True:
                items, is_done = self._take(req_id, channel)
                if items:
                    yield items
                elif is_done:
                    break
                else:
                    await reader.news.wait()
                    reader.news.clear()
            if channel.error is not None:
                raise channel.error
        finally:
            self.unregister(req_id)

    def _open_stream(self, req_id: str, reader: _Reader, buffer_size: int | None) -> _Channel[T]:
        with self._lock:
            channel = self._channels[req_id]
            if channel.callback is not None or channel.reader is not None:
                raise ParameterError("req_id", f"{req_id!r} has a consumer already")
            channel.reader = reader
            channel.buffer_size = buffer_size or channel.buffer_size
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


def _wake_all(readers: Iterable[_Reader]) -> set[asyncio.AbstractEventLoop]:
    """Tell readers that there is news, each event loop once; the loops that were closed under theirs."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[_Reader]] = defaultdict(list)
    for reader in readers:
        by_loop[reader.loop].append(reader)
    closed = set()
    for loop, members in by_loop.items():
        if members[0].thread == threading.get_ident():
            _set_all(members)  # costs a fraction of what waking a loop from outside costs
            continue
        try:
            loop.call_soon_threadsafe(_set_all, members)
        except RuntimeError:
            if not loop.is_closed():
                raise
            closed.add(loop)
    return closed


def _set_all(readers: Sequence[_Reader]) -> None:
    for reader in readers:
        reader.news.set()


def _ignore(_: str) -> None:
    """Stand in where nothing is to be paused."""
