"""Requests to failing servers: each gives one error that says what to do."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save

from logprobe import RemoteLLM
from logprobe.errors import (
    EngineClosedError,
    EngineError,
    LogprobeError,
    MissingPackageError,
    ParameterError,
    PromptTooLongError,
    ServerError,
    UnreachableError,
)
from logprobe.integrations.remote import link
from logprobe.integrations.remote.link import as_error
from logprobe.server import ServerSettings
from logprobe.transport import http_client
from logprobe.transport.http_client import retry_after_s
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe import LLM


LIMIT_S = 60


@contextmanager
def broken_server(reply: bytes | None) -> Iterator[str]:
    """A server that reads a request, sends `reply` and closes the connection; None sends nothing."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    end, _ = listener.accept()
                except OSError:
                    return
                end.recv(1 << 16)
                if reply is None:
                    held.append(end)
                else:
                    answer(end, reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for end in held:
        end.close()


class Slow(BaseHTTPRequestHandler):
    """Reply after a moment, and keep connections open."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(0.05)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None:
        """Suppress the default log."""


def test_an_exchange_that_is_given_up_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any point: it may be the request that closes connections that idled for too long."""
    monkeypatch.setattr(http_client, "KEEP_ALIVE_S", 0.01)

    async def give_up(url: str, num_turns: int) -> None:
        one = link.Link(url, None, LIMIT_S)
        await asyncio.gather(*(one.get("/", 10) for _ in range(5)))
        await asyncio.sleep(0.02)
        task = asyncio.ensure_future(one.get("/", 10))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await one.close()

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        monkeypatch.setattr(server, "handle_error", lambda *_: None)  # clients that disconnect
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", ResourceWarning)
            for num_turns in range(12):
                asyncio.run(give_up(f"http://127.0.0.1:{server.server_port}", num_turns))
                gc.collect()
        server.shutdown()
        thread.join()
    assert [str(one.message) for one in seen if one.category is ResourceWarning] == []


def answer(end: socket.socket, reply: bytes) -> None:
    """Reply, and close after the client: data sent to a closed socket would discard an unread reply."""
    end.settimeout(LIMIT_S)
    with end, suppress(ConnectionError):
        end.sendall(reply)
        with suppress(OSError):  # "not connected" is not a ConnectionError: the client has closed first
            end.shutdown(socket.SHUT_WR)
        while end.recv(1 << 16):
            continue


def http(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


@pytest.fixture(scope="module")
def url(tiny_llm: LLM, new_serving: Any) -> Iterator[str]:
    with new_serving(tiny_llm, ServerSettings()) as (address, _):
        yield address


@pytest.fixture
def far(url: str) -> Iterator[RemoteLLM]:
    with RemoteLLM(url, request_timeout=LIMIT_S) as lm:
        yield lm


async def ends(lm: RemoteLLM) -> list[Any]:
    """Return the results or errors of several requests and a sample."""
    asks = [lm.next_token_logprobs([5, place]) for place in range(2, 5)]
    both = asyncio.gather(*asks, lm.sample([5, 6], 3, []), return_exceptions=True)
    return await asyncio.wait_for(both, 2 * LIMIT_S)


def test_no_server_there_is_an_error_at_once() -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"{port}.*is the server up") as raised:
        RemoteLLM(f"http://127.0.0.1:{port}")
    assert isinstance(raised.value, ConnectionError)
    assert isinstance(raised.value, EngineError)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        (http("200 OK", b"<html>"), "is not a logprobe server"),
        (http("200 OK", b"{}"), "is not a logprobe server"),
        (http("404 Not Found", b"gone"), "without an error of a logprobe server"),
        (http("404 Not Found", b'{"detail": "Not Found"}'), "without an error of a logprobe server"),
    ],
)
def test_another_kind_of_server_is_told_as_such(reply: bytes, word: str) -> None:
    with broken_server(reply) as address, pytest.raises(ServerError, match=word):
        RemoteLLM(address)


@pytest.mark.parametrize(
    "reply", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", b"nonsense\r\n\r\n"]
)
def test_a_server_that_goes_away_ends_every_waiter(far: RemoteLLM, reply: bytes) -> None:
    with broken_server(reply) as address:
        far._source._link._client.base_url = address  # type: ignore[attr-defined]
        assert {type(end) for end in asyncio.run(ends(far))} == {UnreachableError}
    assert {type(end) for end in asyncio.run(ends(far))} == {UnreachableError}, "and now nothing is there"


def test_a_server_that_says_nothing_is_an_error_in_time(
    far: RemoteLLM, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broken_server(None) as address, monkeypatch.context() as impatient:
        far._source._link._client.base_url = address  # type: ignore[attr-defined]
        impatient.setattr(far._source._link, "_timeout_s", 0.5)  # type: ignore[attr-defined]
        errors = asyncio.run(ends(far))
        assert {type(error) for error in errors} == {ServerError}
        assert all("0.5 s" in str(error) for error in errors)
    far._source._link._client.base_url = url  # type: ignore[attr-defined]
    assert not any(isinstance(end, Exception) for end in asyncio.run(ends(far))), "the next ask works"


TABLE = {"logprobs": np.zeros((3, 7), np.float32)}


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"\x00" * 20, save(TABLE), save({"other": TABLE["logprobs"]}), b'{"choices": []}'],
    ids=["nothing", "object", "zeros", "narrow", "unnamed", "no-choice"],
)
def test_a_reply_that_holds_no_rows_or_sample_is_an_error(far: RemoteLLM, body: bytes) -> None:
    with broken_server(http("200 OK", body)) as address:
        far._source._link._client.base_url = address  # type: ignore[attr-defined]
        assert {type(end) for end in asyncio.run(ends(far))} == {ServerError}


def test_the_key_is_brought_and_a_wrong_one_named(tiny_llm: LLM, new_serving: Any) -> None:
    with new_serving(tiny_llm, ServerSettings(api_key=("sesame",))) as (address, _):
        for key in (None, "wrong"):
            with raises(ParameterError, parameter="api_key"):
                RemoteLLM(address, key)
        with RemoteLLM(address, "sesame") as lm:
            assert lm.next_token_logprobs_sync([5]).shape == (lm.vocab_size,)
            assert len(lm.byte_vocab) == lm.vocab_size


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("url", {"url": "127.0.0.1:8000"}),
        ("url", {"url": "http://[::"}),
        ("url", {"url": None}),
        ("request_timeout", {"request_timeout": 0}),
        ("request_timeout", {"request_timeout": "long"}),
        ("batch_size", {"batch_size": 0}),
        ("timeout", {"timeout": -1.0}),
        ("cache_bytes", {"cache_bytes": None}),
    ],
)
def test_a_setting_out_of_range_is_named_and_leaves_no_thread(
    url: str, name: str, settings: dict[str, Any]
) -> None:
    before = set(threading.enumerate())
    with raises(ParameterError, parameter=name):
        RemoteLLM(**({"url": url} | settings))
    assert set(threading.enumerate()) <= before


def test_without_httpx_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'logprobe\[remote\]'"):
        RemoteLLM("http://127.0.0.1:1")


def failure(param: str | None, code: str | None = None) -> bytes:
    message = f"{param}: is wrong" if param else "is wrong"
    return json.dumps({"error": {"message": message, "type": "t", "param": param, "code": code}}).encode()


@pytest.mark.parametrize(
    ("status", "content", "kind", "told"),
    [
        (400, failure("lora"), ParameterError, "lora: is wrong"),
        (400, failure("prompts", "context_length_exceeded"), PromptTooLongError, "prompts: is wrong"),
        (400, failure(None), ServerError, "GET /: status 400: is wrong"),
        (404, failure("model"), ParameterError, "model: is wrong"),
        (401, failure(None, "invalid_api_key"), ParameterError, "api_key: is wrong"),
        (413, failure(None), ServerError, "GET /: status 413: is wrong"),
        (500, failure(None, "engine_error"), ServerError, "GET /: status 500: is wrong"),
        (503, failure(None, "engine_closed"), EngineClosedError, "GET /: is wrong"),
    ],
)
def test_a_failure_becomes_the_error_that_it_would_be_here(
    status: int, content: bytes, kind: type[LogprobeError], told: str
) -> None:
    error = as_error(status, content, "GET /")
    assert type(error) is kind
    assert str(error) == told


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("0", 0.05),
        ("-5", 0.05),
        ("nan", 1.0),
        ("inf", 1.0),
        (None, 1.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 1.0),
    ],
)
def test_a_client_waits_as_long_as_it_is_asked_to(header: str | None, seconds: float) -> None:
    assert retry_after_s(header) == seconds
