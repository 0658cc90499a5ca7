"""Servers that are slow, full, close early, want a key or answer rubbish: one line each, and no key in it."""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.analysis import Endpoint, audit
from logprobe.analysis.auditing.endpoint import Connection
from logprobe.errors import LogprobeError, ParameterError, ServerError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe import LLM

KEY = "sk-very-secret-1234"


@contextmanager
def answering(respond: Callable[[Any], None]) -> Iterator[str]:
    """A server whose every answer is what `respond` writes to the connection."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                line = self.rfile.readline()
                if not line:
                    return
                head += line
            for line in head.lower().splitlines():
                if line.startswith(b"content-length:"):
                    self.rfile.read(int(line.split(b":")[1]))
            try:
                respond(self.wfile)
            except ConnectionError:
                return  # the client has gone, as it should

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def reply(data: bytes, status: str = "200 OK", kind: str = "application/json", **headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(data)}",
        "Connection: close",
    ]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


def always(data: bytes) -> Callable[[Any], None]:
    return lambda out: out.write(data)


def failure(url: str, llm: LLM, **settings: Any) -> LogprobeError:
    with pytest.raises(LogprobeError) as caught:
        audit(Endpoint(url, api_key=KEY, **settings), llm, quick=True)
    message = str(caught.value)
    assert KEY not in message
    assert "\n" not in message
    assert len(message) < 700
    return caught.value


def test_nobody_there(tiny_llm: LLM) -> None:
    with answering(always(b"")) as url:
        pass
    assert isinstance(failure(url, tiny_llm), UnreachableError)


def test_a_connection_that_closes_early(tiny_llm: LLM) -> None:
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"
    with answering(always(cut)) as url:
        assert isinstance(failure(url, tiny_llm), UnreachableError)


def test_a_server_that_never_answers(tiny_llm: LLM) -> None:
    held = threading.Event()
    with answering(lambda _: held.wait(30) and None) as url:
        error = failure(url, tiny_llm, timeout_s=0.2)
        held.set()
    assert isinstance(error, ServerError)
    assert "timeout_s" in str(error)


def test_a_server_that_never_answers_one_form_is_asked_no_other(tiny_llm: LLM) -> None:
    facts = [reply(b"{}")]  # its models
    held = threading.Event()
    asked = []

    def respond(out: Any) -> None:
        if facts:
            out.write(facts.pop())
        else:
            asked.append(out)
            held.wait(30)

    with answering(respond) as url:
        error = failure(url, tiny_llm, timeout_s=0.5)
        held.set()
    assert "timeout_s" in str(error)
    assert len(asked) == 1


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_a_key_that_is_refused(tiny_llm: LLM, status: str) -> None:
    body = json.dumps({"error": {"message": f"no such key: {KEY}"}}).encode()
    with answering(always(reply(body, status))) as url:
        error = failure(url, tiny_llm)
    assert isinstance(error, ParameterError)
    assert error.parameter == "api_key"


@pytest.mark.parametrize(
    "data",
    [
        reply(b"<html><body>Welcome</body></html>", kind="text/html"),
        reply(b'{"choices": [{"text": "a", '),
        reply(b"[" * 100_000),
        reply(b"[]"),
        reply(b"null"),
        reply(b'{"choices": []}'),
        reply(b'{"choices": [{"text": 7}]}'),
        reply(json.dumps({"error": {"message": "out of " + "memory " * 1000}}).encode(), "500 Oh dear"),
        reply(b"\xff\xfe\x00 \n\x1b[31m", "404 Not Found"),
    ],
    ids=["html", "cut", "deep", "list", "null", "no choice", "a number as text", "failing", "rubbish"],
)
def test_rubbish(tiny_llm: LLM, data: bytes) -> None:
    with answering(always(data)) as url:
        assert isinstance(failure(url, tiny_llm), ServerError)


WRONG_ROWS = [
    {"tokens": ["a"], "token_logprobs": ["-1"], "top_logprobs": [{}]},
    {"tokens": ["a"], "token_logprobs": [-1, -2], "top_logprobs": [{}]},
    {"tokens": "a", "token_logprobs": [-1]},
    {"tokens": [["a"]], "token_logprobs": [-1]},
    {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [[1]]},
    {"content": [{"token": "a", "logprob": {}}]},
    {"content": [{"token": "a", "logprob": -1, "bytes": [256]}]},
    {"content": [{"token": "a", "logprob": -1, "token_id": -5}]},
    {"content": [{"token": "a", "logprob": -1, "top_logprobs": {"a": 1}}]},
    {"content": [None]},
    [],
]


@pytest.mark.parametrize("logprobs", WRONG_ROWS)
def test_rows_of_wrong_types(tiny_llm: LLM, logprobs: Any) -> None:
    body = {"choices": [{"text": "a", "message": {"content": "a"}, "logprobs": logprobs}]}
    with answering(always(reply(json.dumps(body).encode()))) as url:
        assert isinstance(failure(url, tiny_llm), ServerError)


@pytest.mark.parametrize("path", ["whole", "stream"])
def test_a_key_that_a_server_says_back_shows_nowhere(path: str) -> None:
    said = f"who are you, {KEY}"
    stream = f"data: {json.dumps({'error': {'message': said}})}\n\n".encode()
    sent = reply(said.encode()) if path == "whole" else reply(stream, kind="text/event-stream")

    async def ask(url: str) -> Any:
        async with Connection(Endpoint(url, api_key=KEY)) as connection:
            return await connection.send("/v1/completions", {})

    with answering(always(sent)) as url, pytest.raises(ServerError, match="who are you, …") as caught:
        asyncio.run(ask(url))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("name", ["prompt_token_ids", "token_ids"])
def test_ids_of_a_larger_vocabulary_are_of_another_model(tiny_llm: LLM, name: str) -> None:
    row = {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"a": -1}]}
    body = {"choices": [{"text": "a", "message": {"content": "a"}, "logprobs": row, name: [1, 100_000]}]}
    with answering(always(reply(json.dumps(body).encode()))) as url:
        error = failure(url, tiny_llm)
    assert isinstance(error, ServerError)
    assert "100000" in str(error)


def test_a_body_without_end(tiny_llm: LLM) -> None:
    def respond(out: Any) -> None:
        out.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        while True:
            out.write(b" " * 65536)

    with answering(respond) as url:
        error = failure(url, tiny_llm, max_bytes=1 << 20)
    assert "longer than" in str(error)


def ask_once(url: str, **settings: Any) -> Any:
    async def ask() -> Any:
        async with Connection(Endpoint(url, api_key=KEY, **settings)) as connection:
            return await connection.send("/v1/models")

    return asyncio.run(ask())


MANY = 1 << 17


@pytest.mark.parametrize(
    "sent",
    [
        reply(b"[" + b"[]," * MANY + b"0]"),
        reply(b"[" + b"{}," * MANY + b"0]"),
        reply(b"[" + b"0," * MANY + b"0]"),
        reply(b"[" * MANY),
        reply(b"data: 0\n" * MANY, kind="text/event-stream"),
        reply(b"data: 0\r" * MANY, kind="text/event-stream"),
        reply(b"\n" * MANY, kind="text/event-stream"),
    ],
    ids=["lists", "objects", "numbers", "deep", "events", "events by CR", "empty lines"],
)
def test_a_reply_of_very_many_values_is_refused_before_it_is_parsed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Any] = []
    monkeypatch.setattr(json, "loads", parsed.append)
    with answering(always(sent)) as url, pytest.raises(ServerError):
        ask_once(url, max_bytes=1 << 21)
    assert parsed == []


def test_a_reply_of_a_thousand_prompt_rows_is_no_such() -> None:
    entries = [{"token": "ab", "logprob": -1.5, "bytes": [97, 98], "token_id": 7}] * 20
    value = [{"token": "ab", "logprob": -1.5, "bytes": [97, 98], "top_logprobs": entries}] * 1024
    with answering(always(reply(json.dumps(value).encode()))) as url:
        assert ask_once(url) == value


def test_a_reply_that_is_compressed_unasked(tiny_llm: LLM) -> None:
    with answering(always(reply(b"xx", content_encoding="gzip"))) as url:
        assert "compressed" in str(failure(url, tiny_llm))


def test_a_full_server_is_waited_for_within_the_time(tiny_llm: LLM) -> None:
    with answering(always(reply(b"{}", "429 Too Many Requests", retry_after="0.05"))) as url:
        error = failure(url, tiny_llm, timeout_s=0.5)
    assert "no complete reply within" in str(error)


def test_a_full_server_is_asked_again() -> None:
    answers = [reply(b"{}", "429 Too Many Requests", retry_after="0"), reply(b'{"data": []}')]

    async def ask(url: str) -> Any:
        async with Connection(Endpoint(url, api_key=KEY)) as connection:
            return await connection.send("/v1/models")

    with answering(lambda out: out.write(answers.pop(0))) as url:
        assert asyncio.run(ask(url)) == {"data": []}
    assert answers == []


@pytest.mark.parametrize(
    ("url", "settings", "parameter"),
    [
        ("ftp://x", {}, "url"),
        ("http://user:secret@x", {}, "url"),
        (7, {}, "url"),
        ("http://x", {"timeout_s": 0}, "timeout_s"),
        ("http://x", {"timeout_s": float("inf")}, "timeout_s"),
        ("http://x", {"max_bytes": 0}, "max_bytes"),
        ("http://x", {"api_key": "a\nb"}, "api_key"),
        ("http://x", {"api_key": "secret "}, "api_key"),
    ],
)
def test_values_that_cannot_be_used(url: Any, settings: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Endpoint(url, **settings)
    assert caught.value.parameter == parameter
    assert "secret" not in str(caught.value)


def test_a_key_shows_nowhere() -> None:
    assert KEY not in repr(Endpoint("http://x", api_key=KEY))


@pytest.mark.parametrize(
    ("asked", "parameter"),
    [
        ({"max_nats": 0}, "max_nats"),
        ({"texts": []}, "texts"),
        ({"texts": "one"}, "texts"),
        ({"texts": [""]}, "texts"),
    ],
)
def test_asks_that_cannot_be(tiny_llm: LLM, asked: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        audit("http://127.0.0.1:9", tiny_llm, **asked)
    assert caught.value.parameter == parameter
