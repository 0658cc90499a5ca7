"""What waits for one consumer of rows, and how a reader in an event loop hears of it.

Before it: the collector, whose lock guards all of this. After it: nothing; rows are carried and not read.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")


@dataclass(slots=True)
class Reader:
    """Who follows a stream: an event of the reader's own loop, set once `min_rows` rows wait."""

    min_rows: int
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    news: asyncio.Event = field(default_factory=asyncio.Event)
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
    telling: threading.RLock = field(default_factory=threading.RLock)
    was_told: bool = False  # whether the source heard last of a pause; guarded by `telling`

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


def wake_all(readers: Iterable[Reader]) -> set[asyncio.AbstractEventLoop]:
    """Tell readers that there is news, each event loop once; the loops that were closed under theirs."""
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
        reader.news.set()
