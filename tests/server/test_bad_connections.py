"""Invalid requests are all counted, and logged at intervals."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter

from logprobe.server.http.protocol import LOG_EVERY_S, UVICORN_LOG, BadConnections

if TYPE_CHECKING:
    import pytest

HERE = ("10.0.0.1", 80)


def test_a_line_comes_at_once_and_then_in_a_while_with_the_number_since(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, registry = [5.0], CollectorRegistry()
    bad_connections = BadConnections(Counter("bad", "Bad.", registry=registry), lambda: now[0])
    for _ in range(100):
        bad_connections.count("an invalid HTTP request", HERE)
    assert caplog.messages == ["connections with an invalid HTTP request: 1; the last from 10.0.0.1:80"]
    now[0] += LOG_EVERY_S
    bad_connections.count("an invalid HTTP request", None)
    since = "connections with an invalid HTTP request: 100; the last from an unknown address"
    assert caplog.messages[1:] == [since]
    assert registry.get_sample_value("bad_total") == 101


def test_uvicorns_own_line_is_left_out_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    BadConnections(Counter("bad", "Bad.", registry=CollectorRegistry()))
    uvicorns = logging.getLogger(UVICORN_LOG)
    uvicorns.warning("Invalid HTTP request received.")
    uvicorns.warning("another")
    assert caplog.messages == ["another"]
