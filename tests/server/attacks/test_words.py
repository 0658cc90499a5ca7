"""No line of the log grows with the words that a client sends."""

from __future__ import annotations

import re
import socket
import time
from typing import Any

import pytest

from server_process import PATIENCE_S, eventually

RUBBISH = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no request\r\n\r\n"
TIMED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")  # as each line of the log begins
UPGRADE = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "told"),
    [(RUBBISH, b"HTTP/1.1 400"), (UPGRADE, b"HTTP/1.1 200")],
    ids=["no request", "another protocol"],
)
def test_connections_that_send_rubbish_are_counted_and_logged_now_and_then(
    serve_process: Any, sent: bytes, told: bytes
) -> None:
    with serve_process() as server:
        start, num_links = time.monotonic(), 40
        for _ in range(num_links):
            with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as link:
                link.sendall(sent)
                assert link.recv(1 << 16).startswith(told)
        most_lines = 1 + (time.monotonic() - start) / 10
        figure = rb"logprobe_bad_connections_total (\d+)"
        assert int(re.findall(figure, server.get("/metrics").data)[0]) == num_links
        eventually(lambda: bool(server.log), "nothing is logged")
        lines = [*server.log]
    assert len(lines) <= most_lines, lines
    assert all(TIMED.match(line) and "127.0.0.1" in line for line in lines)


def test_what_the_operator_asked_for_is_logged_with_the_time(serve_process: Any) -> None:
    with serve_process("--log-requests") as server:
        server.check_alive()
        eventually(lambda: bool(server.log), "nothing is logged")
    assert TIMED.match(server.log[0])
    assert "the cat" in server.log[0]
