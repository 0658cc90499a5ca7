"""uvicorn's HTTP protocol with limits on the time and size of headers, trailers and chunk framing.

uvicorn itself has no limit on trailers, and no timeout for headers or for clients that do not read replies.
Any received byte cancels uvicorn's keep-alive timeout. `decode` enforces the limits on bodies.
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
MAX_PIPELINED: Final = 16  # maximum number of requests that wait for earlier replies on one connection
LOG_EVERY_S: Final = 10.0
UVICORN_LOG: Final = "uvicorn.error"
SINGLE: Final = (b"host", b"origin", b"authorization", b"content-type", b"content-length")
"""Headers that must not be repeated: a proxy and this server might each use a different one of the values."""


def _reply(status: str, message: str, code: str) -> bytes:
    """Encode an error reply that closes the connection."""
    body = ApiError(int(status[:3]), message, code=code).to_json()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head.encode(), len(body), body)


def _bad_header(message: str) -> bytes:
    return _reply("400 Bad Request", message, "invalid_header")


HALF_CLOSED: Final = _reply(
    "400 Bad Request",
    "the client closed its half of the connection before the reply; keep it open until the reply has arrived",
    "connection_half_closed",
)
NO_REQUEST: Final = _reply("400 Bad Request", "not a valid HTTP request", "invalid_http")
HEADER_TOO_LARGE: Final = _reply(
    "431 Request Header Fields Too Large",
    f"the header is larger than {MAX_HEADER_BYTES} bytes; send a smaller one",
    "header_too_large",
)


logger = logging.getLogger("logprobe.server")


class BadConnections:
    """Counts connections without a valid HTTP request, and logs at most one line in `LOG_EVERY_S` seconds."""

    def __init__(self, counter: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter = counter
        self._clock = clock
        self._num_unlogged = 0
        self._next_line_s = 0.0
        logging.getLogger(UVICORN_LOG).addFilter(is_not_counted)

    def count(self, what: str, client: tuple[str, int] | None) -> None:
        """Count a connection; `what` describes what the client sent, for the log."""
        self._counter.inc()
        self._num_unlogged += 1
        now_s = self._clock()
        if now_s >= self._next_line_s:
            sender = "{}:{}".format(*client) if client else "an unknown address"
            logger.warning("connections with %s: %d; the last from %s", what, self._num_unlogged, sender)
            self._next_line_s = now_s + LOG_EVERY_S
            self._num_unlogged = 0


def is_not_counted(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's log line about an invalid request, which `BadConnections` replaces."""
    return not str(record.msg).startswith("Invalid HTTP request")


class TimedProtocol(HttpToolsProtocol):
    """Closes a connection if a header arrives too slowly or is too large, or if the client does not read."""

    def __init__(self, settings: ServerSettings, bad_connections: BadConnections, **options: Any) -> None:
        super().__init__(**options)
        self._bad_connections = bad_connections
        self._timeout_s = settings.header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None  # set while waiting for a header
        self._write_timeout_s = settings.write_timeout_s
        self._write_deadline: asyncio.TimerHandle | None = None  # set while the write buffer is not empty
        self._num_bytes = 0  # non-body bytes since the last header or chunk began
        self._data = b""  # latest input of the parser
        self._fault = b""  # reply to an invalid header
        self._running: RequestResponseCycle | None = None  # the request in progress
        self._is_ending = False  # read no more; close after the replies to fully received requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Start the header timeout of a new connection."""
        super().connection_made(transport)
        # Pause writing as soon as anything is buffered. With 0, HTTPS would pause even if nothing is
        # buffered.
        transport.set_write_buffer_limits(high=1)
        self._expect_header()

    def on_message_begin(self) -> None:
        """Restart the header timeout at the first byte of a request."""
        self._expect_header()
        self._num_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop the header timeout, and start the request if its header is valid."""
        self._stop_expecting()
        fault = self._fault = self._find_fault()
        if fault:
            raise ValueError(fault)  # the parser reports it to uvicorn as an invalid request
        if self.parser.should_upgrade():
            return  # parsed again without `Upgrade`
        self._apply_absolute_form()
        super().on_headers_complete()
        self.headers = []  # collects trailers, which are ignored

    def on_message_complete(self) -> None:
        """Complete the request, unless the parser will parse it again without `Upgrade`."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _find_fault(self) -> bytes:
        """Check a header that the parser accepted (RFC 9112); return the error reply, or b"" if valid."""
        tally = Tally(name for name, _ in self.headers)
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES:
            return HEADER_TOO_LARGE
        if repeated := [name for name in SINGLE if tally[name] > 1]:
            return _bad_header(f"{repeated[0].decode()} occurs more than once; send it once")
        if not tally[b"host"] and self.parser.get_http_version() == "1.1":
            return _bad_header("host is missing; HTTP/1.1 requires it")
        if codings and codings != [b"chunked"]:
            return _bad_header("this transfer-encoding is not supported; use chunked, or send content-length")
        if self.parser.get_method() == b"CONNECT":
            return _bad_header("CONNECT is not supported; this server is not a proxy")
        if len(self.pipeline) >= MAX_PIPELINED:
            return _bad_header(f"more than {MAX_PIPELINED} pipelined requests; read the replies first")
        return b""

    def _apply_absolute_form(self) -> None:
        """Replace `Host` with the authority of an absolute-form target (RFC 9112, section 3.2.2)."""
        if not self.url.startswith((b"/", b"*")):
            rest = self.url.partition(b"://")[2]
            authority = re.split(rb"[/?#]", rest, maxsplit=1)[0]
            self.headers[:] = [pair for pair in self.headers if pair[0] != b"host"] + [(b"host", authority)]
            self.url = b"/" + rest[len(authority) :].removeprefix(b"/")

    def on_chunk_header(self) -> None:
        """Reset the count of non-body bytes at the start of each chunk."""
        self._num_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Exclude body bytes from the count; `decode.read_bytes` limits them."""
        self._num_bytes -= len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Start the header timeout for the next request."""
        super().on_response_complete()
        is_idle = self.timeout_keep_alive_task is not None  # no pipelined request is waiting
        if is_idle and self._deadline is None:
            self._expect_header()

    def data_received(self, data: bytes) -> None:
        """Parse bytes; end the connection if a header, trailer or chunk header is too large."""
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
        """Send 400 and close; if earlier requests are unfinished, close after their replies instead."""
        self._bad_connections.count("an invalid HTTP request", self.client)
        self._end_after_replies(self._fault or NO_REQUEST)

    def _end_after_replies(self, refusal: bytes) -> None:
        """Close after the replies to fully received requests; if none is pending, send `refusal` first."""
        self._stop_expecting()
        self._is_ending = True
        last: RequestResponseCycle | None = self.cycle
        if last is not None and last.more_body:  # the error is in the last request's body
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
        """Parse the request again without its `Upgrade` header.

        With the header, the parser stops after the headers and would read the body as further requests.
        """
        self._bad_connections.count("a request to upgrade to another protocol", self.client)
        error, headers, parser = sys.exception(), self.headers, self.parser
        assert isinstance(error, httptools.HttpParserUpgrade), "uvicorn calls this while it handles one"
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % pair for pair in headers if pair[0] not in {b"connection", b"upgrade"}]
        tokens = b",".join(value.lower() for name, value in headers if name == b"connection").split(b",")
        lines += [b"connection: close"] * (b"close" in map(bytes.strip, tokens))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._feed(b"\r\n".join([*lines, b"", self._data[error.args[0] :]]))

    def pause_writing(self) -> None:
        """Start the write timeout."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self._write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the write timeout."""
        self._stop_writing_deadline()
        super().resume_writing()

    def eof_received(self) -> None:
        """Reply with an error if the client has closed its half of the connection before the reply."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_started:
            self.transport.write(HALF_CLOSED)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timeouts."""
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
