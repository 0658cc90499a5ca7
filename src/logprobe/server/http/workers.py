"""A few threads for what takes longer than the event loop may be away: text, grammars, replies.

Before it: a route. After it: the route again, with the result. Text and grammars are native code that lets
other threads run meanwhile; Python code is made to every few milliseconds.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from logprobe.server.http.errors import server_full

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

NUM_THREADS: Final = 2
MAX_JOBS: Final = 256  # running and waiting


class Workers:
    """Reads a bounded number of bodies, and writes replies, each in order of arrival; for one event loop."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="logprobe-http-read")
        # Apart, so that what has run does not wait behind what others want to have read.
        self._writers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="logprobe-http-write")
        self._num_jobs = 0

    async def run(self, job: Callable[[], T]) -> T:
        """What a job reads; a client that has left meanwhile does not end it.

        Raises:
            ApiError: 429, too many wait.
        """
        if self._num_jobs >= MAX_JOBS:
            raise server_full(f"{self._num_jobs} requests wait to be read")
        self._num_jobs += 1
        future = asyncio.get_running_loop().run_in_executor(self._readers, job)
        future.add_done_callback(self._ended)
        return await future

    async def write(self, job: Callable[[], T]) -> T:
        """What a job writes of a request that has run: it is not lost for want of room."""
        return await asyncio.get_running_loop().run_in_executor(self._writers, job)

    def _ended(self, _: asyncio.Future[T]) -> None:
        self._num_jobs -= 1
