"""`Turns`: what one event loop asks in one of its turns is handed over at once.

A `gather` over sixty prefixes is then one message to another thread, and enters one engine step.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Turn(Generic[T]):
    """What was gathered since the event loop's turn began."""

    loop: asyncio.AbstractEventLoop
    items: list[T] = field(default_factory=list)


@final
class Turns(Generic[T]):
    """Gathers items by event loop; `hand_over` gets those of a turn at its end, in their order."""

    def __init__(self, hand_over: Callable[[list[T]], None]) -> None:
        self._hand_over = hand_over
        self._here = threading.local()  # `turn`: the one that is open in this thread, or None

    def add(self, items: Iterable[T]) -> None:
        """Gather items in the running event loop's turn."""
        loop = asyncio.get_running_loop()
        turn: Turn[T] | None = getattr(self._here, "turn", None)
        # A turn of another loop was cut off with it, or ends by its own callback.
        if turn is None or turn.loop is not loop:
            turn = self._here.turn = Turn(loop)
            loop.call_soon(self._end, turn)
        turn.items.extend(items)

    def end(self) -> None:
        """Hand over at once what this thread has gathered."""
        turn: Turn[T] | None = getattr(self._here, "turn", None)
        if turn is not None:
            self._end(turn)

    def _end(self, turn: Turn[T]) -> None:
        if getattr(self._here, "turn", None) is turn:
            self._here.turn = None
        items, turn.items = turn.items, []
        if items:
            self._hand_over(items)
