"""`StreamingLogprobsCollector`: each request's rows to its own consumer, at that consumer's speed.

Before it: whoever follows the engine. After it: callbacks, or an async stream. It carries rows and reads
none. A request whose consumer lags is paused at the source, or its source made to wait, so what waits here
stays bounded and no other request is slowed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from logprobe.errors import BusyError, require

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

T = TypeVar("T")

CHECK_S = 1.0  # between two looks at whether a consumer can still come


class Parcel(NamedTuple, Generic[T]):
    """What is new of one request."""

    req_id: str
    item: T
    num_rows: int = 1
    is_urgent: bool = False  # its reader is woken however few rows wait, such as at the end


@dataclass(slots=True)
class Reader:
    """Who follows a stream: an event of the reader's own loop, set once `min_rows` rows wait."""

    min_rows: int
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    thread: int = field(default_factory=threading.get_ident)


@dataclass(slots=True)
class Inbox(Generic[T]):
    """What waits for one request's consumer."""

    req_id: str
    buffer_size: int
    items: deque[tuple[T, int]] = field(default_factory=deque)  # with the rows of each
    num_rows: int = 0
    callback: Callable[[list[T]], object] | None = None
    is_delivering: bool = False  # the callback runs, or is about to
    deliverer: int | None = None  # the thread that was last to take for it
    wants_all: bool = False  # the callback gets what does not fill a buffer, too
    is_paused: bool = False  # whether the source is to be
    is_done: bool = False
    error: BaseException | None = None
    reader: Reader | None = None
    publishing: threading.RLock = field(default_factory=threading.RLock)
    published: bool = False  # the `is_paused` that the source heard last; guarded by `publishing`

    @property
    def is_full(self) -> bool:
        """Whether as much waits as may."""
        return self.num_rows >= self.buffer_size

    def put(self, item: T, num_rows: int) -> None:
        """Let an item wait, and note whether its source is to be paused."""
        self.items.append((item, num_rows))
        self.num_rows += num_rows
        # An idle callback takes what waits at once.
        self.is_paused |= self.is_full and (self.callback is None or self.is_delivering)

    def take(self) -> list[T]:
        """The oldest items, up to `buffer_size` rows of them, or a single one that holds more."""
        taken: list[T] = []
        num_taken = 0
        while self.items and (not taken or num_taken + self.items[0][1] <= self.buffer_size):
            item, num_rows = self.items.popleft()
            taken.append(item)
            num_taken += num_rows
        self.num_rows -= num_taken
        self.is_paused &= self.is_full
        return taken

    def is_taken_elsewhere(self) -> bool:
        """Whether another thread than this one is bound to take from a full buffer."""
        here = threading.get_ident()
        if self.reader is not None:
            return self.reader.thread != here and not self.reader.loop.is_closed()
        return self.is_delivering and self.deliverer != here


class StreamingLogprobsCollector(Generic[T]):
    """Rows in order, exactly once, to callbacks (in batches) or to an async stream (as they come).

    Any thread may add. A consumer gets lists of what was added since the last one, of at most `buffer_size`
    rows each. Where the source can be paused, `add` never waits: callbacks run on threads of their own, and a
    request is paused once `buffer_size` rows wait for its consumer. Where it cannot, the thread that fills a
    buffer runs the callback, and who finds a full one waits, or gets a `BusyError` where nobody is
    bound to empty it. Callbacks run outside the lock and may call back into the collector.
    """

    def __init__(
        self,
        buffer_size: int = 100,
        *,
        pause: Callable[[str], object] | None = None,
        resume: Callable[[str], object] | None = None,
        fail: Callable[[str, BaseException], object] | None = None,
    ) -> None:
        """Bound each request to `buffer_size` rows waiting.

        `pause` gets a request's id when so many wait, `resume` when its consumer has taken them, `fail`
        also what its callback raised.

        Raises:
            ParameterError: `buffer_size` is below 1.
        """
        require(buffer_size >= 1, "buffer_size", f"must be at least 1, got {buffer_size}")
        self.buffer_size = buffer_size
        self._can_pause = pause is not None
        self._pause = pause or _ignore
        self._resume = resume or _ignore
        self._fail = fail
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # somebody took, or nobody will any more
        self._inboxes: dict[str, Inbox[T]] = {}
        self._failures: dict[str, BaseException] = {}  # of callbacks on threads of their own, not yet raised

    def open(self, req_id: str) -> None:
        """Make a request known, so that `add_many` keeps what comes for it before its consumer does."""
        with self._lock:
            self._inbox(req_id)

    def register_callback(self, req_id: str, callback: Callable[[list[T]], object]) -> None:
        """Let `callback` take the request's rows: when `buffer_size` wait, and at each flush.

        It gets at once what fills a buffer already. One that raises ends its request: it is unregistered, and
        the error goes to `fail`, and to whoever adds, flushes or finishes.

        Raises:
            ParameterError: the request has a consumer already.
        """
        with self._lock:
            inbox = self._free_inbox(req_id)
            inbox.callback, inbox.wants_all = callback, inbox.is_done
            batch = self._claim(inbox)
        if batch:
            self._begin(inbox, batch)
        elif inbox.is_done:
            self._forget(inbox)

    def unregister(self, req_id: str) -> None:
        """Forget a request and what waits for it; one that is unknown is no error."""
        with self._lock:
            self._failures.pop(req_id, None)
            inbox = self._inboxes.get(req_id)
        if inbox is not None:
            self._forget(inbox)

    def add(self, req_id: str, logprobs: T, *, num_rows: int = 1, timeout: float | None = None) -> None:
        """Add what is new of a request: one item that carries `num_rows` rows.

        Without a `pause` this waits, up to `timeout` seconds, while the buffer is full.

        Raises:
            BusyError: the buffer is full and nobody is bound to empty it, or nobody did in time.
            BaseException: what the request's callback raised; the request is unregistered then.
        """
        with self._lock:
            self._raise_failure(req_id)
            inbox = self._inbox(req_id)
            if not self._can_pause:
                self._wait_for_room(inbox, timeout)
            inbox.put(logprobs, num_rows)
            reader, batch = inbox.reader, self._claim(inbox)
        self._publish_pause(inbox)
        if reader is not None:
            wake_all([reader])
        if batch:
            self._begin(inbox, batch)

    def add_many(self, parcels: Iterable[Parcel[T]]) -> list[str]:
        """Add what is new of many requests, and wake each event loop once.

        What comes for a request that is unknown, or was forgotten, is dropped. The source must heed `pause`.

        Returns:
            The requests whose readers can never come back, since their event loops were closed.

        Raises:
            ParameterError: the collector cannot pause its source.
        """
        require(self._can_pause, "pause", "add_many needs a source that can be paused; give pause and resume")
        woken: dict[str, Reader] = {}
        changed: dict[str, Inbox[T]] = {}
        due: list[tuple[Inbox[T], list[T]]] = []
        with self._lock:
            for req_id, item, num_rows, is_urgent in parcels:
                inbox = self._inboxes.get(req_id)
                if inbox is None:
                    continue
                inbox.put(item, num_rows)
                if inbox.is_paused:
                    changed[req_id] = inbox
                if batch := self._claim(inbox):
                    due.append((inbox, batch))
                reader = inbox.reader
                if reader is not None and (is_urgent or inbox.num_rows >= reader.min_rows):
                    woken[req_id] = reader
        for inbox in changed.values():
            self._publish_pause(inbox)
        for inbox, batch in due:
            self._begin(inbox, batch)
        closed = wake_all(woken.values())
        return [req_id for req_id, reader in woken.items() if reader.loop in closed]

    def flush(self, req_id: str) -> None:
        """Hand over now what waits for a request's callback; one without rows or callback is left alone.

        The callback runs on this thread; where another one runs it already, that one goes on to the last row.

        Raises:
            BaseException: what the callback raised; the request is unregistered then.
        """
        with self._lock:
            self._raise_failure(req_id)
            inbox = self._inboxes.get(req_id)
            if inbox is None or inbox.callback is None:
                return
            inbox.wants_all = True
            batch = self._claim(inbox)
        if batch:
            self._deliver(inbox, batch)

    def flush_all(self) -> None:
        """Flush every request; the first error of a callback is raised once all were flushed."""
        with self._lock:
            names = [*self._inboxes, *self._failures]
        errors: list[Exception] = []
        for req_id in names:
            try:
                self.flush(req_id)
            except Exception as error:  # noqa: BLE001 - one request's callback must not keep rows from the others
                errors.append(error)
        if errors:
            raise errors[0]

    def finish(self, req_id: str, error: BaseException | None = None) -> None:
        """Say that no more comes: the stream ends after what waits, with `error` if one is given.

        A callback gets the rest and is unregistered.

        Raises:
            BaseException: what the callback raised.
        """
        with self._lock:
            self._raise_failure(req_id)
            inbox = self._inbox(req_id)
            inbox.is_done, inbox.error, inbox.wants_all = True, error, True
            reader, batch = inbox.reader, self._claim(inbox)
            is_over = inbox.callback is not None and not inbox.is_delivering
        if reader is not None:
            wake_all([reader])
        if batch:
            self._begin(inbox, batch)
        elif is_over:
            self._forget(inbox)

    def num_waiting(self, req_id: str) -> int:
        """Rows that the request's consumer has not taken."""
        with self._lock:
            return self._inboxes[req_id].num_rows if req_id in self._inboxes else 0

    async def stream(
        self, req_id: str, *, buffer_size: int | None = None, min_rows: int = 1
    ) -> AsyncGenerator[list[T]]:
        """What was added, up to a buffer at a time, until `finish`; leaving early forgets the request.

        `buffer_size` bounds this request in place of the collector's own bound. A reader who needs no step at
        once is woken when `min_rows` rows wait, or a full buffer.

        Raises:
            ParameterError: the request has a consumer already.
            BaseException: the error that `finish` was given.
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

    def _inbox(self, req_id: str) -> Inbox[T]:
        if req_id not in self._inboxes:
            self._inboxes[req_id] = Inbox(req_id, self.buffer_size)
        return self._inboxes[req_id]

    def _free_inbox(self, req_id: str) -> Inbox[T]:
        inbox = self._inbox(req_id)
        is_free = inbox.callback is None and inbox.reader is None
        require(is_free, "req_id", f"{req_id!r} has a consumer already; unregister it first")
        return inbox

    def _raise_failure(self, req_id: str) -> None:
        if (error := self._failures.pop(req_id, None)) is not None:
            raise error

    def _wait_for_room(self, inbox: Inbox[T], timeout: float | None) -> None:
        """Return once the inbox has room; the lock is held, and let go while this waits."""
        deadline = None if timeout is None else time.monotonic() + timeout
        name = inbox.req_id
        while self._is_known(inbox) and inbox.is_full and inbox.is_taken_elsewhere():
            left = CHECK_S if deadline is None else min(deadline - time.monotonic(), CHECK_S)
            if left <= 0:
                raise BusyError(f"{name!r}: its consumer took no row within {timeout} s; add it again later")
            self._room.wait(left)  # not for ever: a reader's event loop may be closed without a word
        if not self._is_known(inbox):
            raise inbox.error or BusyError(f"{name!r} was unregistered while its rows waited; add no more")
        if inbox.is_full:
            raise BusyError(
                f"{name!r}: {inbox.num_rows} rows wait and nobody takes them; register a callback, read the "
                "stream on another thread, or give the collector a pause"
            )

    def _is_known(self, inbox: Inbox[T]) -> bool:
        return self._inboxes.get(inbox.req_id) is inbox

    def _claim(self, inbox: Inbox[T]) -> list[T]:
        """What an idle callback is to have now, if anything; it counts as running from here on."""
        if inbox.callback is None or inbox.is_delivering or not self._is_known(inbox):
            return []
        inbox.wants_all &= bool(inbox.items) or inbox.is_done
        if not inbox.items or not (inbox.is_full or inbox.wants_all):
            return []
        inbox.deliverer = threading.get_ident()
        inbox.is_delivering = True
        self._room.notify_all()
        return inbox.take()

    def _begin(self, inbox: Inbox[T], batch: list[T]) -> None:
        """Have the callback run: here, or on a thread of its own where the source must not wait."""
        if not self._can_pause:
            self._deliver(inbox, batch)
            return
        name = f"logprobe-callback-{inbox.req_id}"
        threading.Thread(target=self._deliver_aside, args=(inbox, batch), name=name, daemon=True).start()

    def _deliver_aside(self, inbox: Inbox[T], batch: list[T]) -> None:
        try:
            self._deliver(inbox, batch)
        except BaseException as error:  # noqa: BLE001 - whoever adds next raises it, since nobody waits here
            if self._fail is None:
                with self._lock:
                    self._failures[inbox.req_id] = error

    def _deliver(self, inbox: Inbox[T], batch: list[T]) -> None:
        """Run the callback on what was claimed, and then a buffer at a time until nothing is due."""
        assert inbox.callback is not None
        while batch:
            try:
                inbox.callback(batch)
            except BaseException as error:
                inbox.error = error  # for those who wait for room
                self._forget(inbox)
                if self._fail is not None:
                    self._fail(inbox.req_id, error)
                raise
            with self._lock:
                inbox.is_delivering = False
                batch = self._claim(inbox)
                self._room.notify_all()
            self._publish_pause(inbox)
        if inbox.is_done:
            self._forget(inbox)

    def _open_stream(self, req_id: str, reader: Reader, buffer_size: int | None) -> Inbox[T]:
        with self._lock:
            inbox = self._free_inbox(req_id)
            inbox.reader = reader
            inbox.buffer_size = buffer_size or inbox.buffer_size
            reader.min_rows = min(reader.min_rows, inbox.buffer_size)
            return inbox

    def _take(self, inbox: Inbox[T]) -> tuple[list[T], bool]:
        with self._lock:
            items, is_done = inbox.take(), inbox.is_done
            self._room.notify_all()
        self._publish_pause(inbox)
        return items, is_done

    def _forget(self, inbox: Inbox[T]) -> None:
        with self._lock:
            if self._is_known(inbox):
                del self._inboxes[inbox.req_id]
            inbox.items.clear()
            inbox.num_rows, inbox.is_paused, inbox.is_done = 0, False, True
            self._room.notify_all()
        self._publish_pause(inbox)
        if inbox.reader is not None:
            wake_all([inbox.reader])

    def _publish_pause(self, inbox: Inbox[T]) -> None:
        """Pause or resume the request at its source, unless it knows; what it hears last is always true."""
        if inbox.is_paused == inbox.published:
            return
        with inbox.publishing:
            while (is_paused := inbox.is_paused) != inbox.published:
                inbox.published = is_paused
                (self._pause if is_paused else self._resume)(inbox.req_id)


def _ignore(*_: Any) -> None:
    """Stand in where nothing is to be paused."""


def wake_all(readers: Iterable[Reader]) -> set[asyncio.AbstractEventLoop]:
    """Wake readers, each event loop once; the loops that were closed under theirs."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[Reader]] = defaultdict(list)
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


def _set_all(readers: Sequence[Reader]) -> None:
    for reader in readers:
        reader.woken.set()
