"""uvicorn's HTTP protocol, with limits on how long and how large all of a request but its body may be.

uvicorn itself waits for a header as long as it takes, keeps all trailers, and for any byte a connection; and
it waits for ever until a reply is read.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import Counter as Tally
from typing import TYPE_CHECKING, Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from logprobe.server.http.errors import ApiError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from prometheus_client import Counter
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from logprobe.server.settings import ServerSettings

MAX_HEADER_BYTES: Final = 1 << 16
MAX_PIPELINED: Final = 16  # requests that wait for the replies before them
LOG_EVERY_S: Final = 10.0
UVICORN_LOG: Final = "uvicorn.error"
SINGLE: Final = (b"host", b"origin", b"authorization", b"content-type", b"content-length")
"""Headers of one value, of which a proxy and this server might each read another line."""


def _reply(status: str, message: str, code: str) -> bytes:
    """Render the last reply of a connection."""
    body = ApiError(int(status[:3]), message, code=code).to_json()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head.encode(), len(body), body)


def _bad_header(message: str) -> bytes:
    return _reply("400 Bad Request", message, "invalid_header")


HALF_CLOSED: Final = _reply(
    "400 Bad Request",
    "the client closed its half of the connection before the reply, as one does that leaves; keep it open",
    "connection_half_closed",
)
NO_REQUEST: Final = _reply("400 Bad Request", "the bytes are no HTTP request", "invalid_http")
HEADER_TOO_LARGE: Final = _reply(
    "431 Request Header Fields Too Large",
    f"the header is larger than {MAX_HEADER_BYTES} bytes; send less",
    "header_too_large",
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
        self._data = b""  # given to the parser last
        self._fault = b""  # the reply to a header that is refused
        self._running: RequestResponseCycle | None = None  # the request whose reply is next
        self._is_ending = False  # after the replies that are owed: nothing more is read

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
        """Expect it no longer, and begin the request unless the header is faulty."""
        self._stop_expecting()
        fault = self._fault = self._find_fault()
        if fault:
            raise ValueError(fault)  # which the parser tells uvicorn as an invalid request
        if self.parser.should_upgrade():
            return  # begins again without its `Upgrade`
        self._apply_absolute_form()
        super().on_headers_complete()
        self.headers = []  # of trailers, which are no part of the request

    def on_message_complete(self) -> None:
        """End the request, unless it begins again without its `Upgrade`."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _find_fault(self) -> bytes:
        """Return the reply to a faulty header that the parser accepts; empty if it is valid (RFC 9112)."""
        tally = Tally(name for name, _ in self.headers)
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES:
            return HEADER_TOO_LARGE
        if repeated := [name for name in SINGLE if tally[name] > 1]:
            return _bad_header(f"{repeated[0].decode()} occurs more than once; send it once")
        if not tally[b"host"] and self.parser.get_http_version() == "1.1":
            return _bad_header("host is missing; send it")
        if codings and codings != [b"chunked"]:
            return _bad_header(
                "transfer-encoding is not supported; send the body as chunked, or with its length"
            )
        if self.parser.get_method() == b"CONNECT":
            return _bad_header("CONNECT is not supported; this server is no proxy")
        if len(self.pipeline) >= MAX_PIPELINED:
            return _bad_header(f"more than {MAX_PIPELINED} requests wait; read the replies first")
        return b""

    def _apply_absolute_form(self) -> None:
        """Take the host from a target that is a whole URL, in the place of `Host` (RFC 9112, 3.2.2)."""
        if not self.url.startswith((b"/", b"*")):
            rest = self.url.partition(b"://")[2]
            authority = re.split(rb"[/?#]", rest, maxsplit=1)[0]
            self.headers[:] = [pair for pair in self.headers if pair[0] != b"host"] + [(b"host", authority)]
            self.url = b"/" + rest[len(authority) :].removeprefix(b"/")

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
        """Take bytes in, and end where too many of them are neither body nor the end of a header."""
        if self._is_ending:
            return
        self._num_bytes += len(data)
        self._feed(data)
        if self._num_bytes > MAX_HEADER_BYTES and not self._is_ending:
            self._end_after_replies(HEADER_TOO_LARGE)

    def _feed(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's own text
        """Answer what is no request, after the replies to the requests before it."""
        self._bad_connections.count("no HTTP request", self.client)
        self._end_after_replies(self._fault or NO_REQUEST)

    def _end_after_replies(self, refusal: bytes) -> None:
        """Close the connection after the replies to whole requests; then, or at once, with a refusal."""
        self._stop_expecting()
        self._is_ending = True
        last: RequestResponseCycle | None = self.cycle
        if last is not None and last.more_body:  # the fault is in its body
            if self.pipeline:
                self.pipeline.popleft()
                last = self.pipeline[0][0] if self.pipeline else self._running
            else:
                if not last.response_started:
                    self.transport.write(refusal)
                self._close()
                return
        if last is not None and not last.response_complete:
            last.keep_alive = False  # closes the connection after the reply
        elif not self.transport.is_closing():
            self.transport.write(refusal)
            self._close()

    def _unsupported_upgrade_warning(self) -> None:
        """Read the request again without its `Upgrade`, which lets the parser take its body for requests."""
        self._bad_connections.count("a request for another protocol", self.client)
        error, headers, parser = sys.exception(), self.headers, self.parser
        assert isinstance(error, httptools.HttpParserUpgrade), "uvicorn calls this where it handles one"
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % pair for pair in headers if pair[0] not in {b"connection", b"upgrade"}]
        tokens = b",".join(value.lower() for name, value in headers if name == b"connection").split(b",")
        lines += [b"connection: close"] * (b"close" in map(bytes.strip, tokens))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._feed(b"\r\n".join([*lines, b"", self._data[error.args[0] :]]))

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
