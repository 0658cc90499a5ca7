"""The bridge from blocking calls to an event loop."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.engine.backends.bridge import LoopThread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make SIGINT raise, whatever an earlier test or the parent process has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_closes_a_stream_that_takes_its_time_to_end() -> None:
    ended, caller = [], threading.get_ident()

    async def items() -> AsyncGenerator[int]:
        try:
            yield 1
            # Like Ctrl-C while the caller waits for the next item. A signal that arrives just before a thread
            # waits is only noticed with the next signal, hence the loop.
            while True:
                signal.pthread_kill(caller, signal.SIGINT)
                await asyncio.sleep(5)
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            ended.append(True)

    bridge = LoopThread()
    try:
        numbers = bridge.iterate(items())
        assert next(numbers) == 1
        with pytest.raises(KeyboardInterrupt):
            next(numbers)
        assert ended == [True]
    finally:
        bridge.close()


def test_an_interrupt_before_there_is_anything_to_cancel_closes_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may come at any time, also just after the loop has begun to make the next item."""
    ended, is_waiting = [], threading.Event()

    async def items() -> AsyncGenerator[int]:
        try:
            yield 1
            is_waiting.set()
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    def interrupted(*work: Any) -> None:
        schedule(*work)
        monkeypatch.undo()
        assert is_waiting.wait(60)
        raise KeyboardInterrupt

    schedule = asyncio.run_coroutine_threadsafe
    bridge = LoopThread()
    try:
        numbers = bridge.iterate(items())
        assert next(numbers) == 1
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(numbers)
        assert ended == [True]
    finally:
        bridge.close()


AT_SHUTDOWN = """
from logprobe.engine.backends.bridge import LoopThread
from logprobe.errors import EngineClosedError

async def items():
    yield 1
    yield 2

class Holder:
    def __init__(self):
        self.bridge, self.error = LoopThread(), EngineClosedError
    def __del__(self):
        try:
            self.bridge.run(items().__anext__())
        except self.error:
            print("refused")
        self.bridge.close()
        print("closed")

holder = Holder()
numbers = holder.bridge.iterate(items())
print(next(numbers))
"""


def test_a_stream_and_a_finalizer_do_not_hang_the_shutdown_of_the_interpreter() -> None:
    """Python has stopped the loop's thread before it destroys the last objects of a program."""
    command = [sys.executable, "-c", AT_SHUTDOWN]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["1", "refused", "closed"]
    assert not ended.stderr
