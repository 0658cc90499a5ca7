"""Metrics on a separate port: without a key, and nothing else there."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import logprobe
from server_process import Attacked, eventually, serving_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def locked(tiny_model_folder: Path) -> Iterator[Attacked]:
    """A server with a key, started with two port flags of another server that have no effect here."""
    others = ("--engine-worker-queue-port", "8182", "--cache-queue-port", "8183")
    flags = ("--metrics-port", "0", *others, "--api-key", "secret")
    with serving_process(tiny_model_folder, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def figures(locked: Attacked) -> Attacked:
    """The same server by its metrics port, which its log names."""

    def ports() -> list[str]:
        return re.findall(r"http://127\.0\.0\.1:(\d+)/metrics", "".join(locked.log))

    eventually(lambda: bool(ports()), "the port is never told")
    return replace(locked, port=int(ports()[0]))


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_answers_as_health_does_without_a_key(locked: Attacked, method: str) -> None:
    assert locked.ask(method, "/ping").status == locked.get("/health").status == 200
    assert locked.ask(method, "/ping").data == locked.get("/health").data


def test_the_version_needs_no_key(locked: Attacked) -> None:
    assert json.loads(locked.get("/version").data) == {"version": logprobe.__version__}


def test_they_need_no_key_there(locked: Attacked, figures: Attacked) -> None:
    assert locked.get("/metrics").status == 401
    body = b'{"prompt": "the cat", "max_tokens": 3, "ignore_eos": true}'
    assert locked.send("/v1/completions", body, **KEY).status == 200
    told = figures.get("/metrics")
    assert told.status == 200
    assert b"logprobe_completion_tokens_total 3.0" in told.data
    assert b"logprobe_completion_tokens_total 3.0" in locked.get("/metrics", **KEY).data


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/openapi.json"])
def test_nothing_else_is_there(figures: Attacked, path: str) -> None:
    for reply in (figures.get(path, **KEY), figures.send(path, b"{}", **KEY)):
        assert reply.status == 404
        assert reply.error["code"] == "no_such_route"


def test_nothing_is_sent_there(figures: Attacked) -> None:
    assert figures.send("/metrics", b"{}").status == 405


@pytest.mark.parametrize(
    ("header", "code"),
    [({"Host": "a.example"}, "host_not_allowed"), ({"Origin": "http://a.example"}, "origin_not_allowed")],
)
def test_web_pages_are_refused_there_too(figures: Attacked, header: dict[str, str], code: str) -> None:
    reply = figures.get("/metrics", **header)
    assert reply.status == 403
    assert reply.error["code"] == code
