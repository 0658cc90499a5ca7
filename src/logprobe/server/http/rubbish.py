"""Connections that send what is no request: counted, and told in the log now and then, whatever their rate.

Before it: `protocol`. After it: `/metrics` and the log.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import Counter

LOG_EVERY_S: Final = 10.0
UVICORN_LOG: Final = "uvicorn.error"

logger = logging.getLogger("logprobe.server")


class Rubbish:
    """The count of one server; used from its event loop."""

    def __init__(self, counter: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter = counter
        self._clock = clock
        self._num_untold = 0
        self._next_line_s = 0.0
        logging.getLogger(UVICORN_LOG).addFilter(is_not_counted)

    def note(self, what: str, client: tuple[str, int] | None) -> None:
        """Count one."""
        self._counter.inc()
        self._num_untold += 1
        now_s = self._clock()
        if now_s >= self._next_line_s:
            sender = "{}:{}".format(*client) if client else "an unknown address"
            logger.warning("connections that sent %s: %d; the last from %s", what, self._num_untold, sender)
            self._next_line_s = now_s + LOG_EVERY_S
            self._num_untold = 0


def is_not_counted(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's is not the one that it writes for each connection that sends no request."""
    return not str(record.msg).startswith("Invalid HTTP request")
