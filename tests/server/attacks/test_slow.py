"""Clients that send slowly, without end, or not at all."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def impatient(serve_process: Any) -> Iterator[Any]:
    """A server that waits half a second for headers and bodies."""
    with serve_process("--header-timeout-s", "0.5", "--body-timeout-s", "0.5") as server:
        yield server


def rest_of(link: socket.socket) -> bytes:
    """All that the server still says, until it closes."""
    link.settimeout(20)
    data = b""
    while part := link.recv(1 << 16):
        data += part
    return data


HEADER = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HEADER])
def test_a_header_that_does_not_end_closes_the_connection(impatient: Any, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as link:
        link.sendall(sent)
        start = time.monotonic()
        assert rest_of(link) == b""
        assert time.monotonic() - start < 5


def test_a_second_header_has_its_time_too(impatient: Any) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200")
        link.sendall(b"GET /hea")
        rest_of(link)


def test_a_header_without_end_is_cut_off(attacked: Any) -> None:
    with socket.create_connection(("127.0.0.1", attacked.port)) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            link.sendall((b"X-Filler: " + b"a" * 100_000 + b"\r\n") * 1000)
    attacked.check_alive()


def test_a_body_that_does_not_come_is_a_408(impatient: Any) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as link:
        link.sendall(HEADER + b"Content-Length: 100\r\n\r\n{")
        told = rest_of(link)
    assert told.startswith(b"HTTP/1.1 408")
    assert b"body_timeout_s" in told
    impatient.check_alive()


def test_a_client_that_closes_its_half_is_told_why_it_gets_no_reply(attacked: Any) -> None:
    body = b'{"prompt": "the cat", "max_tokens": 100, "ignore_eos": true, "n": 60}'
    with socket.create_connection(("127.0.0.1", attacked.port)) as link:
        link.sendall(HEADER + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        link.shutdown(socket.SHUT_WR)
        reply = rest_of(link)
    assert reply.startswith(b"HTTP/1.1 400")
    assert b"connection_half_closed" in reply
    attacked.check_alive()


def test_a_client_that_closes_its_half_between_requests_gets_nothing_more(attacked: Any) -> None:
    with socket.create_connection(("127.0.0.1", attacked.port)) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reply = b""
        while not reply.endswith(b'{"status":"ok"}'):
            reply += link.recv(1 << 16)
        link.shutdown(socket.SHUT_WR)
        assert rest_of(link) == b""


def test_the_health_tells_no_path(attacked: Any) -> None:
    assert b"/" not in attacked.get("/health").data
