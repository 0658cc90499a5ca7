"""Graceful shutdown: reject new requests, let running requests finish, and abort the rest with an error.

SIGTERM or Ctrl-C starts the shutdown; a second signal ends the process immediately.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import uvicorn

from logprobe import runtime

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from logprobe.server.limits import Lifetime

CHECK_S: Final = 0.1
LAST_S: Final = 10  # seconds to send errors to the clients of aborted requests

logger = logging.getLogger("logprobe.server")


class DrainingServer(uvicorn.Server):
    """uvicorn server that keeps listening while requests drain, so that new requests get a 503."""

    def __init__(self, config: uvicorn.Config, lifetime: Lifetime) -> None:
        super().__init__(config)
        self._lifetime = lifetime
        self._loop: asyncio.AbstractEventLoop | None = None  # set at startup
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """Start draining; on the second signal, exit."""
        if self._lifetime.is_draining or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._lifetime.is_draining = True
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        tasks, drain_s = self.server_state.tasks, self._lifetime.drain_s
        what = "shutting down: %d requests in progress have %g s to finish; a second signal aborts them"
        logger.info(what, len(tasks), drain_s)
        deadline_s = runtime.monotonic() + drain_s
        while tasks and runtime.monotonic() < deadline_s:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(CHECK_S)
        if tasks:
            logger.warning("%d requests did not finish in time and are aborted", len(tasks))
            self._lifetime.is_over = True
        else:
            logger.info("all requests have finished")
        self.should_exit = True
