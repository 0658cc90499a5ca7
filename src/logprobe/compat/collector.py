"""`StreamingLogprobsCollector`: `RequestStreams` with callbacks, and with sources that cannot be paused."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from logprobe.errors import BusyError, require
from logprobe.transport.streams import Inbox, RequestStreams, check_is_free, wake_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logprobe.transport.streams import Parcel

T = TypeVar("T")

CHECK_S = 1.0  # between two checks that a consumer can still come


@dataclass(slots=True)
class CallbackInbox(Inbox[T], Generic[T]):
    """An inbox whose consumer may be a callback."""

    callback: Callable[[list[T]], object] | None = None
    is_delivering: bool = False  # the callback runs, or is about to
    deliverer: int | None = None  # the last thread that took items for the callback
    wants_all: bool = False  # the callback also gets what does not fill a buffer

    @property
    def is_lagging(self) -> bool:
        """True if the buffer is full and the callback is not idle; an idle one takes at once."""
        return self.is_full and (self.callback is None or self.is_delivering)

    @property
    def has_consumer(self) -> bool:
        """True if a callback or a stream follows the request."""
        return self.reader is not None or self.callback is not None

    def is_taken_elsewhere(self) -> bool:
        """Return True if another thread is bound to take from a full buffer."""
        here = threading.get_ident()
        if self.reader is not None:
            return self.reader.thread != here and not self.reader.loop.is_closed()
        return self.is_delivering and self.deliverer != here


class StreamingLogprobsCollector(RequestStreams[T]):
    """Rows in order, exactly once, to callbacks (in batches) or to async streams.

    Any thread may add. A consumer gets lists of at most `buffer_size` rows. With `pause`, `add` never waits:
    callbacks run on threads of their own, and a request is paused once `buffer_size` rows wait for its
    consumer. Without it, the thread that fills a buffer runs the callback, and a thread that finds a full one
    waits, or gets a `BusyError` if nobody is bound to empty it. Callbacks run outside the lock and may call
    back into the collector.

    Args:
        buffer_size: rows of a request that may wait.
        pause: called with a request's id when that many rows wait.
        resume: called with its id when its consumer has taken rows.
        fail: called with its id and what its callback raised.

    Raises:
        ParameterError: `buffer_size` is below 1.
    """

    def __init__(
        self,
        buffer_size: int = 100,
        *,
        pause: Callable[[str], object] | None = None,
        resume: Callable[[str], object] | None = None,
        fail: Callable[[str, BaseException], object] | None = None,
    ) -> None:
        super().__init__(buffer_size, pause=pause or _ignore, resume=resume or _ignore)
        self._can_pause = pause is not None
        self._fail = fail
        self._room = threading.Condition(self._lock)  # notified when items were taken or dropped
        self._failures: dict[str, BaseException] = {}  # of callbacks on threads of their own, not yet raised

    def register_callback(self, req_id: str, callback: Callable[[list[T]], object]) -> None:
        """Call `callback` with the request's rows when `buffer_size` of them wait, and at each flush.

        A buffer that is full already is delivered at once. A callback that raises ends its request: it is
        unregistered, and `fail`, and the next thread that adds, flushes or finishes, get the error.

        Raises:
            ParameterError: the request has a consumer already.
        """
        with self._lock:
            inbox = self._inbox(req_id)
            check_is_free(inbox)
            inbox.callback, inbox.wants_all = callback, inbox.is_done
            batch = self._claim(inbox)
        if batch:
            self._begin(inbox, batch)
        elif inbox.is_done:
            self._forget(inbox)

    def unregister(self, req_id: str) -> None:
        """Forget a request and what waits for it; unknown ids are ignored."""
        with self._lock:
            self._failures.pop(req_id, None)
        super().unregister(req_id)

    def add(self, req_id: str, logprobs: T, *, num_rows: int = 1, timeout: float | None = None) -> None:
        """Add one item of a request that carries `num_rows` rows.

        Without `pause` this waits, up to `timeout` seconds, while the buffer is full.

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
        """Add items of many requests, and wake each event loop once.

        Items of requests that are unknown, or were forgotten, are dropped. The source must heed `pause`.

        Returns:
            The requests whose readers can never come back, since their event loops were closed.

        Raises:
            ParameterError: the collector cannot pause its source.
        """
        require(self._can_pause, "pause", "add_many needs a source that can be paused; give pause and resume")
        parcels = list(parcels)
        closed = super().add_many(parcels)
        for req_id in dict.fromkeys(parcel.req_id for parcel in parcels):
            with self._lock:
                inbox = self._find(req_id)
                batch = [] if inbox is None else self._claim(inbox)
            if inbox is not None and batch:
                self._begin(inbox, batch)
        return closed

    def flush(self, req_id: str) -> None:
        """Deliver what waits for a request's callback now; without rows or a callback this does nothing.

        The callback runs on this thread; if another thread is running it, that one delivers the rest.

        Raises:
            BaseException: what the callback raised; the request is unregistered then.
        """
        with self._lock:
            self._raise_failure(req_id)
            inbox = self._find(req_id)
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
        """End a request: its stream ends after what waits, with `error` if given.

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

    def _new_inbox(self, req_id: str) -> CallbackInbox[T]:
        return CallbackInbox(req_id, self.buffer_size)

    def _inbox(self, req_id: str) -> CallbackInbox[T]:
        return cast("CallbackInbox[T]", super()._inbox(req_id))

    def _find(self, req_id: str) -> CallbackInbox[T] | None:
        return cast("CallbackInbox[T] | None", self._inboxes.get(req_id))

    def _take(self, inbox: Inbox[T]) -> tuple[list[T], bool]:
        taken = super()._take(inbox)
        with self._lock:
            self._room.notify_all()
        return taken

    def _forget(self, inbox: Inbox[T]) -> None:
        super()._forget(inbox)
        with self._lock:
            self._room.notify_all()

    def _raise_failure(self, req_id: str) -> None:
        if (error := self._failures.pop(req_id, None)) is not None:
            raise error

    def _wait_for_room(self, inbox: CallbackInbox[T], timeout: float | None) -> None:
        """Return once the inbox has room; the lock is held, and released while this waits."""
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

    def _claim(self, inbox: CallbackInbox[T]) -> list[T]:
        """Take what an idle callback should get now, if anything; it counts as running from here on."""
        if inbox.callback is None or inbox.is_delivering or not self._is_known(inbox):
            return []
        inbox.wants_all &= bool(inbox.items) or inbox.is_done
        if not inbox.items or not (inbox.is_full or inbox.wants_all):
            return []
        inbox.deliverer = threading.get_ident()
        inbox.is_delivering = True
        self._room.notify_all()
        batch = inbox.take()
        inbox.is_paused |= inbox.is_lagging
        return batch

    def _begin(self, inbox: CallbackInbox[T], batch: list[T]) -> None:
        """Run the callback: here, or on a thread of its own if the source must not wait."""
        if not self._can_pause:
            self._deliver(inbox, batch)
            return
        name = f"logprobe-callback-{inbox.req_id}"
        threading.Thread(target=self._deliver_aside, args=(inbox, batch), name=name, daemon=True).start()

    def _deliver_aside(self, inbox: CallbackInbox[T], batch: list[T]) -> None:
        try:
            self._deliver(inbox, batch)
        except BaseException as error:  # noqa: BLE001 - the next thread that adds raises it
            if self._fail is None:
                with self._lock:
                    self._failures[inbox.req_id] = error

    def _deliver(self, inbox: CallbackInbox[T], batch: list[T]) -> None:
        """Call the callback with what was claimed, and then a buffer at a time until nothing is due."""
        assert inbox.callback is not None
        while batch:
            self._publish_pause(inbox)
            try:
                inbox.callback(batch)
            except BaseException as error:
                inbox.error = error  # for threads that wait for room
                self._forget(inbox)
                if self._fail is not None:
                    self._fail(inbox.req_id, error)
                raise
            with self._lock:
                inbox.is_delivering = False
                batch = self._claim(inbox)
                is_over = inbox.is_done and not inbox.is_delivering
                self._room.notify_all()
            if is_over:
                self._forget(inbox)


def _ignore(*_: Any) -> None:
    """Stand in for `pause` and `resume` where the source has none."""
