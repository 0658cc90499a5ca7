"""The bridge from plain calls to an event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from logprobe.engine.backends.bridge import LoopThread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


def test_an_interrupt_closes_a_stream_that_takes_its_time_to_end() -> None:
    ended, caller = [], threading.get_ident()

    async def items() -> AsyncGenerator[int]:
        try:
            yield 1
            # As Ctrl-C does, while the caller waits for the next item.
            signal.pthread_kill(caller, signal.SIGINT)
            await asyncio.Event().wait()
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
