"""Clients that send slowly, without end, or not at all."""

from __future__ import annotations

import re
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.server import ServerSettings
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server_process import Attacked


@pytest.fixture(scope="module")
def impatient(serve_process: Any) -> Iterator[Attacked]:
    """A server with timeouts of half a second for headers and bodies."""
    with serve_process("--header-timeout-s", "0.5", "--body-timeout-s", "0.5") as server:
        yield server


def sent(server: Attacked, data: bytes, *, is_half_closed: bool = False) -> socket.socket:
    """Open a connection whose first bytes (and half-close) reach the server together.

    The server is stopped meanwhile, so they are in time even if this process has to wait for a core.
    """
    with server.stopped():
        link = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        link.sendall(data)
        if is_half_closed:
            link.shutdown(socket.SHUT_WR)
    return link


def rest_of(link: socket.socket) -> bytes:
    """Return all that the server still sends until it closes or resets the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while part := link.recv(1 << 16):
            data += part
    return data


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEADER = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def completion(body: bytes) -> bytes:
    return HEADER + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("begun", [b"", b"GET /hea", HEADER])
def test_a_header_that_does_not_end_closes_the_connection(impatient: Attacked, begun: bytes) -> None:
    with sent(impatient, begun) as link:
        start = time.monotonic()
        assert rest_of(link) == b""
        assert time.monotonic() - start < ServerSettings().header_timeout_s


def test_a_second_header_has_its_time_too(impatient: Attacked) -> None:
    with sent(impatient, HEALTH) as link:
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200")
        link.sendall(b"GET /hea")
        rest_of(link)


def test_a_header_without_end_is_cut_off(attacked: Attacked) -> None:
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=PATIENCE_S) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            link.sendall((b"X-Filler: " + b"a" * 100_000 + b"\r\n") * 1000)
    attacked.check_alive()


def test_a_body_that_does_not_come_is_a_408(impatient: Attacked) -> None:
    with sent(impatient, HEADER + b"Content-Length: 100\r\n\r\n{") as link:
        told = rest_of(link)
    assert told.startswith(b"HTTP/1.1 408")
    assert b"body_timeout_s" in told
    with sent(impatient, completion(b'{"prompt": "the cat", "max_tokens": 2}')) as link:
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_client_that_closes_its_half_is_told_why_it_gets_no_reply(attacked: Attacked) -> None:
    body = b'{"prompt": "the cat", "max_tokens": 100, "ignore_eos": true, "n": 60}'
    with sent(attacked, completion(body), is_half_closed=True) as link:
        reply = rest_of(link)
    assert reply.startswith(b"HTTP/1.1 400")
    assert b"connection_half_closed" in reply
    attacked.check_alive()


def test_a_client_that_closes_its_half_between_requests_gets_nothing_more(attacked: Attacked) -> None:
    with sent(attacked, HEALTH) as link:
        reply = b""
        while not reply.endswith(b'{"status":"ok"}'):
            part = link.recv(1 << 16)
            assert part, reply
            reply += part
        link.shutdown(socket.SHUT_WR)
        assert rest_of(link) == b""


CHUNKED = (
    b"%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
ROUTES = [b"GET /health", b"POST /v1/completions", b"POST /nowhere"]
TRAILER_PARTS = {"lines": (b"", b"X-More: 1\r\n" * 10_000), "one value": (b"X-More: ", b"a" * 100_000)}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("name", TRAILER_PARTS)
@pytest.mark.parametrize("route", ROUTES)
def test_trailers_without_end_are_cut_off(attacked: Attacked, route: bytes, name: str) -> None:
    begin, more = TRAILER_PARTS[name]
    with attacked.watched(), socket.create_connection(("127.0.0.1", attacked.port), PATIENCE_S) as link:
        link.sendall(CHUNKED % route + chunk(b"{}") + b"0\r\n" + begin)
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            link.sendall(more * 200)


@pytest.mark.parametrize("route", ROUTES)
def test_trailers_that_do_not_end_in_time_close_the_connection(impatient: Attacked, route: bytes) -> None:
    with sent(impatient, CHUNKED % route + chunk(b"{}") + b"0\r\n") as link:
        closes_beside(link, b"X-More: 1\r\n")


def test_a_body_that_nobody_asked_for_ends_in_time(impatient: Attacked) -> None:
    with sent(impatient, CHUNKED % b"GET /health") as link:
        closes_beside(link, chunk(b"a"))


def test_bytes_that_begin_no_request_keep_no_connection(impatient: Attacked) -> None:
    with sent(impatient, HEALTH) as link:
        closes_beside(link, b"\r\n")


@pytest.mark.parametrize("ask", [HEALTH, completion(b'{"prompt": "the cat", "max_tokens": 2}')])
@pytest.mark.parametrize("blank", [b"\r", b"\n", b"\r\n", b"\r\n\r\n"])
@pytest.mark.parametrize("is_early", [False, True])
def test_nor_do_they_where_silence_follows(
    impatient: Attacked, ask: bytes, blank: bytes, is_early: bool
) -> None:
    """Applies if they come before the end of the reply and after it."""
    with sent(impatient, ask + blank * is_early) as link:
        if not is_early:
            head, _, body = link.recv(1 << 16).partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None, head
            while len(body) < int(length[1]):
                body += link.recv(1 << 16)
            link.sendall(blank)
        rest_of(link)


def closes_beside(link: socket.socket, more: bytes) -> None:
    """Assert that the server finishes and closes although bytes keep coming."""
    with suppress(ConnectionResetError, BrokenPipeError):
        link.settimeout(0.1)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            link.sendall(more)
            with suppress(TimeoutError):
                if not link.recv(1 << 16):
                    return
        pytest.fail("the server keeps the connection")


def test_a_body_of_small_chunks_with_trailers_is_read(attacked: Attacked) -> None:
    body = b'{"prompt": "the cat", "max_tokens": 2}' + b" " * 20_000
    chunks = b"".join(map(chunk, (body[place : place + 1] for place in range(len(body)))))
    with socket.create_connection(("127.0.0.1", attacked.port), PATIENCE_S) as link:
        link.sendall(CHUNKED % b"POST /v1/completions" + chunks + b"0\r\nX-Checksum: 1\r\n\r\n")
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_large_chunk_is_read(attacked: Attacked) -> None:
    body = b'{"prompt": "the cat", "max_tokens": 2}' + b" " * 2_000_000
    with socket.create_connection(("127.0.0.1", attacked.port), PATIENCE_S) as link:
        link.sendall(CHUNKED % b"POST /v1/completions" + chunk(body) + b"0\r\n\r\n")
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_the_health_tells_no_path(attacked: Attacked) -> None:
    assert b"/" not in attacked.get("/health").data
