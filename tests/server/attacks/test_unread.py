"""Clients that request large replies and do not read them."""

from __future__ import annotations

import json
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from server_process import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server_process import Attacked

# Route, body, and number of requests that it counts as. Replies are larger than what the kernel
# buffers for a connection.
LARGE: dict[str, tuple[str, dict[str, Any], int]] = {
    "rows": ("/v1/next_token_logprobs", {"prompts": [[5 + number % 200] for number in range(8000)]}, 8000),
    "a record": (
        "/v1/completions",
        {"prompt": [[5, 6, 7, 8] * 25] * 40, "max_tokens": 1, "logprobs": 1, "prompt_logprobs": 20},
        40,
    ),
    "a stream": (
        "/v1/completions",
        {"prompt": [[5, 6, 7, 8] * 25] * 40, "max_tokens": 1, "prompt_logprobs": 20, "stream": True},
        40,
    ),
}


@pytest.fixture(scope="module")
def patient(serve_process: Any) -> Iterator[Attacked]:
    """A server that allows many requests."""
    with serve_process("--max-requests", "8000") as server:
        yield server


@pytest.fixture(scope="module")
def impatient(serve_process: Any) -> Iterator[Attacked]:
    """A server with a write timeout of half a second."""
    with serve_process("--max-requests", "8000", "--write-timeout-s", "0.5") as server:
        yield server


@contextmanager
def unread(server: Attacked, name: str) -> Iterator[socket.socket]:
    """A connection on which a reply has begun that is larger than its buffers."""
    path, body, _ = LARGE[name]
    data = json.dumps(body).encode()
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(PATIENCE_S)
        link.connect(("127.0.0.1", server.port))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        link.sendall(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        assert link.recv(1) == b"H"
        yield link


def num_requests(server: Attacked) -> int:
    found: int = json.loads(server.get("/v1/capabilities").data)["in_use"]["requests"]
    return found


def is_idle(server: Attacked) -> bool:
    """Return True if the engine has finished all requests."""
    told = server.get("/metrics").data.decode()
    return all(f"\nlogprobe_{name}_requests 0.0\n" in told for name in ("running", "waiting"))


def size_of_rest(link: socket.socket) -> int:
    """Return the number of bytes until the connection closes or is reset."""
    size = 0
    try:
        while part := link.recv(1 << 16):
            size += len(part)
    except ConnectionResetError:
        pass
    return size


@pytest.mark.parametrize("name", LARGE)
def test_a_reply_counts_until_it_is_read(patient: Attacked, name: str) -> None:
    with unread(patient, name) as link:
        eventually(lambda: is_idle(patient), "the engine goes on")
        assert num_requests(patient) == LARGE[name][2]
        size_of_rest(link)
    eventually(lambda: num_requests(patient) == 0, "it still counts")


@pytest.mark.parametrize("name", LARGE)
def test_a_reply_that_is_not_taken_closes_the_connection(impatient: Attacked, name: str) -> None:
    path, body, _ = LARGE[name]
    whole = len(impatient.post(path, **body).data)
    with impatient.watched(), unread(impatient, name) as link:
        eventually(lambda: num_requests(impatient) == 0, "it still counts")
        assert size_of_rest(link) < whole
    impatient.check_alive()
