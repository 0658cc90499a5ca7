"""`StreamingLogprobsCollector`: `RequestStreams` with callbacks and support for sources that cannot pause."""

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

CHECK_S = 1.0  # seconds between checks that the consumer still exists


@dataclass(slots=True)
class CallbackInbox(Inbox[T], Generic[T]):
    """An inbox whose consumer may be a callback."""

    callback: Callable[[list[T]], object] | None = None
    is_delivering: bool = False  # True if the callback is running or about to run
    deliverer: int | None = None  # thread that last took items for the callback
    wants_all: bool = False  # if True, the callback also gets items that do not fill a buffer

    @property
    def is_lagging(self) -> bool:
        """True if the buffer is full and there is no idle callback that can take the items immediately."""
        return self.is_full and (self.callback is None or self.is_delivering)

    @property
    def has_consumer(self) -> bool:
        """True if the request has a callback or a stream."""
        return self.reader is not None or self.callback is not None

    def is_taken_elsewhere(self) -> bool:
        """Return True if another thread will take items from a full buffer."""
        here = threading.get_ident()
        if self.reader is not None:
            return self.reader.thread != here and not self.reader.loop.is_closed()
        return self.is_delivering and self.deliverer != here


class StreamingLogprobsCollector(RequestStreams[T]):
    """Delivers rows in order and exactly once, to callbacks (in batches) or to async streams.

    Any thread may add rows. A consumer gets lists of at most `buffer_size` rows. With `pause`, `add` never
    waits: callbacks run on separate threads, and a request is paused when `buffer_size` of its rows are
    pending. Without `pause`, the thread that fills a buffer runs the callback. A thread that finds a full
    buffer waits, or gets a `BusyError` if no other thread will empty the buffer. Callbacks run outside the
    lock and may call the collector.

    Args:
        buffer_size: maximum number of pending rows per request.
        pause: function that is called with a request's id when the request's buffer is full.
        resume: function that is called with the id when the consumer has taken rows.
        fail: function that is called with the id and the exception that the request's callback raised.

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
        self._room = threading.Condition(self._lock)  # notified when items are taken or dropped
        # exceptions of callbacks on separate threads, not raised yet
        self._failures: dict[str, BaseException] = {}

    def register_callback(self, req_id: str, callback: Callable[[list[T]], object]) -> None:
        """Call `callback` with a request's rows when `buffer_size` rows are pending, and at each flush.

        If the buffer is already full, its rows are delivered immediately. If the callback raises, the request
        is unregistered, `fail` is called, and the exception is raised in the thread that runs the callback.
        If this is a separate thread and there is no `fail`, the exception is raised in the next call that
        adds rows, flushes or finishes.

        Raises:
            ParameterError: the request already has a consumer.
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
        """Remove a request and its pending rows; ignore unknown ids."""
        with self._lock:
            self._failures.pop(req_id, None)
        super().unregister(req_id)

    def add(self, req_id: str, logprobs: T, *, num_rows: int = 1, timeout: float | None = None) -> None:
        """Add one item, which contains `num_rows` rows, for a request.

        Without `pause`, wait up to `timeout` seconds while the buffer is full.

        Raises:
            BusyError: the buffer is full, and no other thread will empty it, or none did so in time.
            BaseException: the request's callback raised this exception; the request is unregistered.
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
        """Add items for many requests, and wake each event loop once.

        Items for unknown or unregistered requests are dropped. The source must stop adding items after
        `pause`.

        Returns:
            Ids of requests whose readers are gone because their event loops were closed.

        Raises:
            ParameterError: the collector cannot pause its source.
        """
        require(self._can_pause, "pause", "is required by add_many; give pause and resume")
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
        """Deliver a request's pending rows to its callback now; do nothing without rows or a callback.

        The callback runs on this thread. If another thread is already running the callback, that thread
        delivers the rows instead.

        Raises:
            BaseException: the callback raised this exception; the request is unregistered.
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
        """Flush every request, then raise the first exception of a callback, if there was any."""
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
        """End a request: after the pending rows, its stream ends, or raises `error` if given.

        A callback gets the pending rows and is then unregistered.

        Raises:
            BaseException: the callback raised this exception.
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
        """Wait until the inbox has room; the caller must hold the lock, which is released while waiting."""
        deadline = None if timeout is None else time.monotonic() + timeout
        name = inbox.req_id
        while self._is_known(inbox) and inbox.is_full and inbox.is_taken_elsewhere():
            left = CHECK_S if deadline is None else min(deadline - time.monotonic(), CHECK_S)
            if left <= 0:
                raise BusyError(f"{name!r}: the consumer took no row within {timeout} s; retry later")
            # check at intervals, since a reader's event loop may be closed without notice
            self._room.wait(left)
        if not self._is_known(inbox):
            raise inbox.error or BusyError(
                f"{name!r}: was unregistered while its rows were pending; stop adding rows"
            )
        if inbox.is_full:
            raise BusyError(
                f"{name!r}: {inbox.num_rows} rows are pending without a consumer; register a callback, read "
                "the stream on another thread, or give the collector a pause callback"
            )

    def _claim(self, inbox: CallbackInbox[T]) -> list[T]:
        """Return the items that an idle callback should get now, if any, and mark the callback as running."""
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
        """Run the callback on a new thread if the source can be paused, else on this thread."""
        if not self._can_pause:
            self._deliver(inbox, batch)
            return
        name = f"logprobe-callback-{inbox.req_id}"
        threading.Thread(target=self._deliver_aside, args=(inbox, batch), name=name, daemon=True).start()

    def _deliver_aside(self, inbox: CallbackInbox[T], batch: list[T]) -> None:
        try:
            self._deliver(inbox, batch)
        except BaseException as error:  # noqa: BLE001 - raised by the next thread that adds
            if self._fail is None:
                with self._lock:
                    self._failures[inbox.req_id] = error

    def _deliver(self, inbox: CallbackInbox[T], batch: list[T]) -> None:
        """Call the callback with `batch`, then with further batches as long as some are due."""
        assert inbox.callback is not None
        while batch:
            self._publish_pause(inbox)
            try:
                inbox.callback(batch)
            except BaseException as error:
                inbox.error = error  # also raised in threads that wait for room
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
    """Do nothing; the default for `pause` and `resume`."""
