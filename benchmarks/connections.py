"""Attacks by a connection itself: what it sends beside requests, what it keeps, and what it does not read."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

HOLD_S = 3.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"


@contextlib.contextmanager
def connected(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Some connections."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(count)
        ]


def posted(path: str, body: dict[str, Any]) -> bytes:
    """A request as it goes over the wire."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def without_end(port: int, begin: bytes, more: bytes) -> None:
    """Send up to 20 MB behind a body, on one connection after another."""
    end = time.monotonic() + HOLD_S
    while time.monotonic() < end:
        with connected(port, 1) as (link,), contextlib.suppress(ConnectionError):
            link.sendall(CHUNKED + begin + more * (20_000_000 // len(more)))


def blank_lines(port: int) -> None:
    """Keep connections open by bytes that begin no request."""
    with connected(port, 50) as links:
        for link in links:
            link.sendall(HEALTH)
        end = time.monotonic() + HOLD_S
        while time.monotonic() < end:
            for link in links:
                with contextlib.suppress(ConnectionError):
                    link.sendall(b"\r\n")
            time.sleep(0.1)


def half_bodies(port: int, count: int) -> None:
    """Keep requests open of which half a body has come."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connected(port, count) as links:
        for link in links:
            link.sendall(head + b'Content-Length: 1000\r\n\r\n{"prompt":')
        time.sleep(HOLD_S)


def unread(port: int, count: int, request: bytes) -> None:
    """Ask, read one byte of each reply, and hold the rest."""
    with connected(port, count) as links:
        for link in links:
            link.sendall(request)
        links[0].recv(1)
        time.sleep(HOLD_S)


ROWS = posted("/v1/next_token_logprobs", {"prompts": [[5 + number] for number in range(512)]})
LONG = posted(
    "/v1/completions",
    {"prompt": "the cat", "n": 128, "max_tokens": 700, "ignore_eos": True, "stream": True},
)

CONNECTIONS: dict[str, Callable[[int], None]] = {
    "trailers without end": lambda port: without_end(port, b"", b"X-More: 1\r\n"),
    "a trailer's value without end": lambda port: without_end(port, b"X-More: ", b"a"),
    "50 connections kept by blank lines": blank_lines,
    "512 requests with half a body": lambda port: half_bodies(port, 512),
    "25 unread replies of 512 whole rows": lambda port: unread(port, 25, ROWS),
    "4 unread streams of 128 long completions": lambda port: unread(port, 4, LONG),
}
"""By name: each takes the port, and returns after some seconds."""
