"""How the server ends: it takes no more work, lets what runs end, and cuts off the rest with an error.

SIGTERM or Ctrl-C begins it; a second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

import uvicorn

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from logprobe.server.limits import Lifetime

CHECK_S: Final = 0.1
LAST_S: Final = 10  # in which those that are cut off are told so

logger = logging.getLogger("logprobe.server")


class DrainingServer(uvicorn.Server):
    """uvicorn, which goes on to listen while requests in progress end, so that new ones are told why not."""

    def __init__(self, config: uvicorn.Config, lifetime: Lifetime) -> None:
        super().__init__(config)
        self._lifetime = lifetime
        self._loop: asyncio.AbstractEventLoop | None = None  # once there is something to drain
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """Begin to drain; the second time, end."""
        if self._lifetime.is_draining or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._lifetime.is_draining = True
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        tasks, drain_s = self.server_state.tasks, self._lifetime.drain_s
        what = "no new requests; %d in progress may end within %g s; a second signal ends them at once"
        logger.info(what, len(tasks), drain_s)
        deadline_s = time.monotonic() + drain_s
        while tasks and time.monotonic() < deadline_s:  # noqa: ASYNC110 - uvicorn tells nobody of their end
            await asyncio.sleep(CHECK_S)
        if tasks:
            logger.warning("%d requests did not end in time, and are told so", len(tasks))
            self._lifetime.is_over = True
        else:
            logger.info("all requests have ended")
        self.should_exit = True
