"""`LoopThread`: an event loop on its own thread, on which synchronous code runs coroutines."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from logprobe import runtime
from logprobe.engine.creator import Creator
from logprobe.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
    from concurrent.futures import Future

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for synchronous callers, even where an event loop already runs (as in notebooks)."""

    def __init__(self) -> None:
        self._creator = Creator()
        self._loop = asyncio.new_event_loop()
        self._lock = runtime.Lock()
        self._is_closed = False  # guarded by `_lock`
        self._thread = runtime.Thread(target=self._loop.run_forever, name="logprobe-loop", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop's thread; cancelling the returned future cancels the coroutine.

        Raises:
            EngineClosedError: `close` was called, or this process is a fork of the creating process.
        """
        if self._creator.is_gone:
            work.close()
            self._creator.check()
        with self._lock:
            if self._is_closed:
                work.close()
                raise EngineClosedError("the engine is closed; make a new one")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; an interrupt of the caller cancels the coroutine.

        Raises:
            EngineClosedError: `close` was called, or this process is a fork of the creating process.
        """
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def iterate(self, items: AsyncGenerator[T]) -> Generator[T]:
        """Iterate over an async generator synchronously; stopping early closes the async generator.

        Raises:
            EngineClosedError: `close` was called, or this process is a fork of the creating process.
        """
        turns = _Turns()
        try:
            while batch := self.run(_next_of(items, turns)):
                yield batch[0]
        finally:
            with suppress(EngineClosedError):  # `close` has ended the generator already
                self.run(_close(items, turns))

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Schedule `callback(*args)` on the loop's thread.

        Raises:
            EngineClosedError: `close` was called, or this process is a fork of the creating process.
        """
        self._creator.check()
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine is closed; make a new one")
            self._loop.call_soon_threadsafe(callback, *args)

    def close(self) -> None:
        """Wait for running work, then stop the loop and its thread; further calls have no effect."""
        if self._creator.is_gone:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(_others_end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Turns:
    """Ensures that only one task at a time advances an async generator."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.present: asyncio.Task[Any] | None = None  # the task that holds the lock


async def _next_of(items: AsyncGenerator[T], turns: _Turns) -> tuple[T] | None:
    async with turns.lock:
        turns.present = asyncio.current_task()
        try:
            async for item in items:
                return (item,)
        finally:
            turns.present = None
    return None


async def _close(items: AsyncGenerator[T], turns: _Turns) -> None:
    # An interrupt may come before the caller can cancel anything; a cancelled task must still finish.
    if turns.present is not None and not turns.present.cancelling():
        turns.present.cancel()
    async with turns.lock:
        await items.aclose()


async def _others_end() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
