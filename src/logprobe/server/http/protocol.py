"""uvicorn's HTTP protocol, with limits on how long and how large all of a request but its body may be.

Before it: the socket. After it: the application, which reads the body within a time of its own. uvicorn
itself waits for a header as long as it takes, keeps all trailers, and for any byte a connection; and it
waits for ever until a reply is read.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from logprobe.server.http.errors import ApiError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from prometheus_client import Counter

    from logprobe.server.settings import ServerSettings

MAX_HEADER_BYTES: Final = 1 << 16
LOG_EVERY_S: Final = 10.0
UVICORN_LOG: Final = "uvicorn.error"

_HALF_CLOSED_BODY: Final = ApiError(
    400,
    "the client closed its half of the connection before the reply, as one does that leaves; keep it open",
    code="connection_half_closed",
).to_json()
HALF_CLOSED: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_HALF_CLOSED_BODY), _HALF_CLOSED_BODY)
)


logger = logging.getLogger("logprobe.server")


class BadConnections:
    """Counts connections that send no HTTP request and logs them now and then; for one event loop."""

    def __init__(self, counter: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter = counter
        self._clock = clock
        self._num_unlogged = 0
        self._next_line_s = 0.0
        logging.getLogger(UVICORN_LOG).addFilter(is_not_counted)

    def count(self, what: str, client: tuple[str, int] | None) -> None:
        """Count one that sent `what`."""
        self._counter.inc()
        self._num_unlogged += 1
        now_s = self._clock()
        if now_s >= self._next_line_s:
            sender = "{}:{}".format(*client) if client else "an unknown address"
            logger.warning("connections that sent %s: %d; the last from %s", what, self._num_unlogged, sender)
            self._next_line_s = now_s + LOG_EVERY_S
            self._num_unlogged = 0


def is_not_counted(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's is not the one that it writes for each connection that sends no request."""
    return not str(record.msg).startswith("Invalid HTTP request")


class TimedProtocol(HttpToolsProtocol):
    """Closes a connection whose next header does not come in time, or whose header or trailers do not end.

    Nor does it wait longer for a client that does not take what it is sent.
    """

    def __init__(self, settings: ServerSettings, bad_connections: BadConnections, **options: Any) -> None:
        super().__init__(**options)
        self._bad_connections = bad_connections
        self._timeout_s = settings.header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None  # while a header is awaited
        self._write_timeout_s = settings.write_timeout_s
        self._write_deadline: asyncio.TimerHandle | None = None  # while something sent is not taken
        self._num_bytes = 0  # that are no body, since a header or a chunk last began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Expect a header."""
        super().connection_made(transport)
        # Whatever is not taken at once pauses who writes; at 0 HTTPS is paused with nothing to write, too.
        transport.set_write_buffer_limits(high=1)
        self._expect_header()

    def on_message_begin(self) -> None:
        """Expect the rest of it."""
        self._expect_header()
        self._num_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Expect it no longer."""
        self._stop_expecting()
        super().on_headers_complete()
        self.headers = []  # of trailers, which are no part of the request

    def on_chunk_header(self) -> None:
        """Let each chunk of a body have its own frame."""
        self._num_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Leave the count of a body's bytes to who reads it."""
        self._num_bytes -= len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Expect the next header, whatever else comes before it."""
        super().on_response_complete()
        is_idle = self.timeout_keep_alive_task is not None  # no other request waits for its turn
        if is_idle and self._deadline is None:
            self._expect_header()

    def data_received(self, data: bytes) -> None:
        """Take bytes in, and close where too many of them are neither body nor the end of a header."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEADER_BYTES:
            self._close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request."""
        self._bad_connections.count("no HTTP request", self.client)
        super().send_400_response(msg)

    def _unsupported_upgrade_warning(self) -> None:
        self._bad_connections.count("a request for another protocol", self.client)

    def pause_writing(self) -> None:
        """Expect that what was written is taken."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self._write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Expect it no longer: all of it was."""
        self._stop_writing_deadline()
        super().resume_writing()

    def eof_received(self) -> None:
        """Tell a client that has closed its half why it gets no more; one that has left does not read it."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_started:
            self.transport.write(HALF_CLOSED)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing comes any more."""
        self._stop_expecting()
        self._stop_writing_deadline()
        super().connection_lost(exc)

    def _expect_header(self) -> None:
        self._stop_expecting()
        self._deadline = self.loop.call_later(self._timeout_s, self._close)

    def _stop_expecting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_writing_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _close(self) -> None:
        self._stop_expecting()
        if not self.transport.is_closing():
            self.transport.close()
