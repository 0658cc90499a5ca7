"""`RequestStreams`: one bounded stream of items per request, with backpressure.

If a reader is too slow, its request is paused in the engine, so that the buffer stays bounded and no other
request is slowed down. Items are not inspected.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from logprobe import runtime
from logprobe.errors import require

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

T = TypeVar("T")


class Parcel(NamedTuple, Generic[T]):
    """An item for one request, with the number of rows in it."""

    req_id: str
    item: T
    num_rows: int = 1
    is_urgent: bool = False  # if True, wake the reader even for few rows, such as at the end


@dataclass(slots=True)
class Reader:
    """Consumer of a stream; `woken` is set, on the consumer's event loop, when `min_rows` rows wait."""

    min_rows: int
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    thread: int = field(default_factory=lambda: runtime.get_ident())  # noqa: PLW0108 - replaceable


@dataclass(slots=True)
class Inbox(Generic[T]):
    """Items for one request that its consumer has not taken yet; guarded by the lock in `RequestStreams`."""

    req_id: str
    buffer_size: int  # number of waiting rows at which the source is paused
    items: deque[tuple[T, int]] = field(default_factory=deque)  # (item, number of rows)
    num_rows: int = 0
    is_paused: bool = False  # True if the source should be paused
    is_done: bool = False
    error: BaseException | None = None  # raised in the reader after the last item
    reader: Reader | None = None
    publishing: runtime.RLock = field(default_factory=lambda: runtime.RLock())  # noqa: PLW0108 - replaceable
    published: bool = False  # value of `is_paused` last reported to the source; guarded by `publishing`

    @property
    def is_full(self) -> bool:
        """True if at least `buffer_size` rows wait."""
        return self.num_rows >= self.buffer_size

    @property
    def is_lagging(self) -> bool:
        """True if the buffer is full, so that the source should pause."""
        return self.is_full

    @property
    def has_consumer(self) -> bool:
        """True if a reader is attached."""
        return self.reader is not None

    def put(self, item: T, num_rows: int) -> None:
        """Append an item, and set `is_paused` if the consumer lags."""
        self.items.append((item, num_rows))
        self.num_rows += num_rows
        self.is_paused |= self.is_lagging

    def take(self) -> list[T]:
        """Remove and return the oldest items: up to `buffer_size` rows, or a single item with more rows."""
        taken: list[T] = []
        num_taken = 0
        while self.items and (not taken or num_taken + self.items[0][1] <= self.buffer_size):
            item, num_rows = self.items.popleft()
            taken.append(item)
            num_taken += num_rows
        self.num_rows -= num_taken
        self.is_paused &= self.is_full
        return taken


class RequestStreams(Generic[T]):
    """One bounded stream per request, which delivers items in order and exactly once.

    Any thread may add items.

    Args:
        buffer_size: number of waiting rows at which a request is paused.
        pause: function that pauses the request with the given id; called without holding the lock.
        resume: function that resumes the request, called when the reader has taken rows or has left.

    Raises:
        ParameterError: `buffer_size` is below 1.
    """

    def __init__(
        self, buffer_size: int, *, pause: Callable[[str], object], resume: Callable[[str], object]
    ) -> None:
        require(buffer_size >= 1, "buffer_size", f"must be at least 1, got {buffer_size}")
        self.buffer_size = buffer_size
        self._pause = pause
        self._resume = resume
        self._lock = runtime.Lock()
        self._inboxes: dict[str, Inbox[T]] = {}

    def open(self, req_id: str) -> None:
        """Accept items for a request from now on."""
        with self._lock:
            self._inbox(req_id)

    def add_many(self, parcels: Iterable[Parcel[T]]) -> list[str]:
        """Add items for many requests and wake each event loop once.

        Items for requests that are not open are dropped. The source must stop adding items after `pause`.

        Returns:
            Ids of requests whose readers are gone because their event loops were closed.
        """
        woken: dict[str, Reader] = {}
        paused: dict[str, Inbox[T]] = {}
        with self._lock:
            for req_id, item, num_rows, is_urgent in parcels:
                inbox = self._inboxes.get(req_id)
                if inbox is None:
                    continue
                inbox.put(item, num_rows)
                if inbox.is_paused:
                    paused[req_id] = inbox
                reader = inbox.reader
                if reader is not None and (is_urgent or inbox.num_rows >= reader.min_rows):
                    woken[req_id] = reader
        for inbox in paused.values():
            self._publish_pause(inbox)
        closed = wake_all(woken.values())
        return [req_id for req_id, reader in woken.items() if reader.loop in closed]

    async def stream(
        self, req_id: str, *, buffer_size: int | None = None, min_rows: int = 1
    ) -> AsyncGenerator[list[T]]:
        """Yield lists of items, with at most `buffer_size` rows per list or a single item with more rows.

        Closing the generator unregisters the request.

        Args:
            req_id: id of the request, which is opened if `open` has not been called.
            buffer_size: buffer size for this request; None for the constructor's value.
            min_rows: number of waiting rows at which the reader wakes up, at most `buffer_size`.

        Raises:
            ParameterError: the request has a consumer already.
        """
        reader = Reader(min_rows)
        inbox = self._open_stream(req_id, reader, buffer_size)
        try:
            while True:
                items, is_done = self._take(inbox)
                if items:
                    yield items
                elif is_done:
                    break
                else:
                    await reader.woken.wait()
                    reader.woken.clear()
            if inbox.error is not None:
                raise inbox.error
        finally:
            self._forget(inbox)

    def unregister(self, req_id: str) -> None:
        """Remove a request and its waiting items; unknown ids are ignored."""
        with self._lock:
            inbox = self._inboxes.get(req_id)
        if inbox is not None:
            self._forget(inbox)

    def num_waiting(self, req_id: str) -> int:
        """Return the number of rows that the request's consumer has not taken yet."""
        with self._lock:
            return self._inboxes[req_id].num_rows if req_id in self._inboxes else 0

    def _new_inbox(self, req_id: str) -> Inbox[T]:
        return Inbox(req_id, self.buffer_size)

    def _inbox(self, req_id: str) -> Inbox[T]:
        if req_id not in self._inboxes:
            self._inboxes[req_id] = self._new_inbox(req_id)
        return self._inboxes[req_id]

    def _is_known(self, inbox: Inbox[T]) -> bool:
        return self._inboxes.get(inbox.req_id) is inbox

    def _open_stream(self, req_id: str, reader: Reader, buffer_size: int | None) -> Inbox[T]:
        with self._lock:
            inbox = self._inbox(req_id)
            check_is_free(inbox)
            inbox.reader = reader
            inbox.buffer_size = buffer_size or inbox.buffer_size
            reader.min_rows = min(reader.min_rows, inbox.buffer_size)
            return inbox

    def _take(self, inbox: Inbox[T]) -> tuple[list[T], bool]:
        with self._lock:
            items, is_done = inbox.take(), inbox.is_done
        self._publish_pause(inbox)
        return items, is_done

    def _forget(self, inbox: Inbox[T]) -> None:
        with self._lock:
            if self._is_known(inbox):
                del self._inboxes[inbox.req_id]
            inbox.items.clear()
            inbox.num_rows, inbox.is_paused, inbox.is_done = 0, False, True
        self._publish_pause(inbox)
        if inbox.reader is not None:
            wake_all([inbox.reader])

    def _publish_pause(self, inbox: Inbox[T]) -> None:
        """Pause or resume the source until its state agrees with `is_paused`."""
        if inbox.is_paused == inbox.published:
            return
        with inbox.publishing:
            while (is_paused := inbox.is_paused) != inbox.published:
                inbox.published = is_paused
                (self._pause if is_paused else self._resume)(inbox.req_id)


def check_is_free(inbox: Inbox[T]) -> None:
    """Check that a request has no consumer yet.

    Raises:
        ParameterError: the request has a consumer.
    """
    is_free = not inbox.has_consumer
    require(is_free, "req_id", f"{inbox.req_id!r} has a consumer already; unregister it first")


def wake_all(readers: Iterable[Reader]) -> set[asyncio.AbstractEventLoop]:
    """Wake readers, waking each event loop once; return the loops that are closed."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[Reader]] = defaultdict(list)
    for reader in readers:
        by_loop[reader.loop].append(reader)
    closed = set()
    for loop, members in by_loop.items():
        if members[0].thread == runtime.get_ident():
            _set_all(members)  # much cheaper than waking a loop from another thread
            continue
        try:
            loop.call_soon_threadsafe(_set_all, members)
        except RuntimeError:
            if not loop.is_closed():
                raise
            closed.add(loop)
    return closed


def _set_all(readers: Sequence[Reader]) -> None:
    for reader in readers:
        reader.woken.set()
