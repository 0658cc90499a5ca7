"""How the server ends: it takes no more work, lets what runs end, and cuts off the rest with an error.

Before it: SIGTERM, or Ctrl-C. After it: a process that ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import uvicorn

if TYPE_CHECKING:
    from types import FrameType

    from logprobe.server.limits import Lifetime

LAST_S: Final = 10  # in which those that are cut off are told so

logger = logging.getLogger("logprobe.server")


class DrainingServer(uvicorn.Server):
    """uvicorn, which goes on to listen while requests in progress end, so that new ones are told why not."""

    def __init__(self, config: uvicorn.Config, lifetime: Lifetime) -> None:
        super().__init__(config)
        self._lifetime = lifetime
        self._deadline_s: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """Begin to drain; the second time, end."""
        if self._lifetime.is_draining:
            self.should_exit = self.force_exit = True
        self._lifetime.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Look after the drain, ten times a second."""
        if self._lifetime.is_draining and not self.should_exit:
            self._drain()
        return await super().on_tick(counter)

    def _drain(self) -> None:
        now_s, num_open = asyncio.get_running_loop().time(), len(self.server_state.tasks)
        if self._deadline_s is None:
            self._deadline_s = now_s + self._lifetime.drain_s
            what = "no new requests; %d in progress may end within %g s; a second signal ends them at once"
            logger.info(what, num_open, self._lifetime.drain_s)
        if num_open and now_s >= self._deadline_s:
            logger.warning("%d requests did not end in time, and are told so", num_open)
            self._lifetime.is_over = self.should_exit = True
        elif not num_open:
            logger.info("all requests have ended")
            self.should_exit = True
