"""Constant replies are made once, and each route has a limit on requests in progress."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import re
import socket
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from starlette.responses import Response

from logprobe.server import ServerSettings
from logprobe.server.http.gate import CALL, MANY_OPEN, PIECE_BYTES, Call, Gate, send_pieces
from logprobe.server.http.guard import endpoint
from logprobe.server.http.replies import Documents
from logprobe.server.http.workers import Workers
from logprobe.server.limits import Limits
from logprobe.server.metrics import Metrics
from server_process import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from server_process import Attacked

KEPT = ("/v1/tokenizer", "/openapi.json", "/v1/logits_processors", "/v1/models", "/tokenizer_info")
NUM_GETS = 400


def asked(server: Attacked, path: str, *headers: str) -> socket.socket:
    """Return a connection on which a request was sent."""
    link = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    link.sendall("\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode())
    return link


def answer_of(link: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a connection's only reply."""
    with link, link.makefile("rb") as file:
        status = int(file.readline().split()[1])
        lines = iter(file.readline, b"\r\n")
        headers = dict(line.decode().lower().strip().split(": ", 1) for line in lines)
        return status, headers, file.read(int(headers.get("content-length", 0)))


@pytest.mark.parametrize("path", [*KEPT, "/v1/capabilities", "/metrics"])
def test_as_many_gets_as_one_likes_hold_nobody_up(attacked: Attacked, path: str) -> None:
    with attacked.watched():
        links = [asked(attacked, path, "Connection: close") for _ in range(NUM_GETS)]
        answers = map(answer_of, links)
        assert not [(status, body) for status, _, body in answers if status != 200]


async def turns(*work: Coroutine[Any, Any, Any]) -> int:
    """Return how many iterations of the event loop some concurrent coroutines need."""
    tasks, count = [asyncio.ensure_future(one) for one in work], 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        count += 1
    await asyncio.gather(*tasks)
    return count


def test_others_are_served_between_any_two_pieces() -> None:
    """Holds even if every client takes what is sent at once."""
    pieces, num_replies, num_pieces = [], 8, 3

    async def send(message: Any) -> None:
        if message["body"]:
            pieces.append(message["body"])

    async def run() -> None:
        bodies = [bytes([number]) * (num_pieces * PIECE_BYTES) for number in range(num_replies)]
        messages = [{"type": "http.response.body", "body": body} for body in bodies]
        lock = asyncio.Lock()
        sent = await turns(*(send_pieces(message, send, lock) for message in messages))
        assert sent >= num_replies * num_pieces
        assert b"".join(sorted(pieces)) == b"".join(bodies)
        assert pieces[:num_replies] == [body[:PIECE_BYTES] for body in bodies], "each waits its turn"

    asyncio.run(run())


@pytest.mark.parametrize("num_open", [MANY_OPEN - 1, MANY_OPEN])
def test_what_many_replies_took_is_given_back_once_all_are_sent(
    monkeypatch: pytest.MonkeyPatch, num_open: int
) -> None:
    returned = threading.Event()
    monkeypatch.setattr("logprobe.server.http.gate.return_freed", returned.set)
    scope = {"type": "http", "method": "GET", "headers": [(b"host", b"localhost")], "scheme": "http"}

    async def run() -> None:
        may_end = asyncio.Event()

        async def app(*_: Any) -> None:
            await may_end.wait()

        async def nothing(*_: Any) -> Any:
            """An ASGI callable that does nothing."""

        gate = Gate(app, ServerSettings(), lambda _: None)
        calls = [asyncio.create_task(gate(dict(scope), nothing, nothing)) for _ in range(num_open)]
        await asyncio.sleep(0)
        assert not returned.is_set()
        may_end.set()
        await asyncio.gather(*calls)
        if gate._returning is not None:
            await gate._returning

    asyncio.run(run())
    assert returned.is_set() == (num_open >= MANY_OPEN)


def test_figures_are_written_beside_the_event_loop_and_once_for_all_who_ask_meanwhile(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_end, told = threading.Event(), threading.Event(), []

    def written(_: Any) -> bytes:
        is_writing.set()
        assert may_end.wait(PATIENCE_S)
        told.append(b"text %d" % len(told))
        return told[-1]

    async def run() -> None:
        metrics = Metrics(server.service.models.engines)
        first = asyncio.create_task(metrics.text())
        assert await asyncio.to_thread(is_writing.wait, PATIENCE_S)
        others = [asyncio.create_task(metrics.text()) for _ in range(8)]
        await asyncio.sleep(0)
        others.pop(0).cancel()
        assert not first.done()
        may_end.set()
        assert await first == b"text 0"
        assert await asyncio.gather(*others) == [b"text 1"] * len(others), "as they are once asked for"
        assert await metrics.text() == b"text 2"

    monkeypatch.setattr("logprobe.server.metrics.generate_latest", written)
    asyncio.run(run())


@pytest.mark.parametrize("path", KEPT)
def test_who_has_a_document_is_not_sent_it_again(attacked: Attacked, path: str) -> None:
    status, headers, data = answer_of(asked(attacked, path))
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(data)
    etag = headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', etag)
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        status, headers, data = answer_of(asked(attacked, path, f"If-None-Match: {known}"))
        assert (status, headers["etag"], data) == (304, etag, b""), known
    assert answer_of(asked(attacked, path, 'If-None-Match: "other"'))[0] == 200


def test_a_document_is_made_once_for_all_who_ask(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    read = Workers.read

    async def counted(workers: Workers, job: Any, num_bytes: int | None) -> Any:
        jobs.append(job)
        return await read(workers, job, num_bytes)

    monkeypatch.setattr(Workers, "read", counted)
    replies: list[Any] = []
    threads = [threading.Thread(target=lambda: replies.append(server.get("/v1/tokenizer"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(jobs) <= 1, "none, where another test has asked before"
    assert len({reply.content for reply in replies}) == 1
    assert replies[0].text == server.service.text.tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize("num_turns", range(8))
def test_a_document_is_made_once_whenever_another_asks_for_it(num_turns: int) -> None:
    made: list[str] = []
    request: Any = SimpleNamespace(headers={})

    def make() -> bytes:
        made.append("document")
        return b"{}"

    async def read(job: Any, _: int | None) -> Any:
        return job()

    async def run() -> None:
        workers: Any = SimpleNamespace(read=read)
        documents = Documents(workers)
        first = asyncio.create_task(documents.reply(request, "facts", make))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        second = await documents.reply(request, "facts", make)
        assert (await first).body == second.body == b"{}"

    asyncio.run(run())
    assert made == ["document"]


@pytest.mark.parametrize("is_open", [False, True])
def test_of_a_route_that_waits_a_bound_is_in_progress_until_it_is_sent(server: Any, is_open: bool) -> None:
    """An open route does no work, and always replies."""
    models: Any = copy.copy(server.service.models)
    models.settings = dataclasses.replace(models.settings, max_requests=2, max_waiting=0)
    request: Any = SimpleNamespace(
        headers={}, query_params={}, client=None, method="GET", scope={CALL: Call("")}
    )

    async def run() -> None:
        may_end = asyncio.Event()

        async def waiting(*_: Any) -> Response:
            await may_end.wait()
            return Response()

        async def send(_: Any) -> None:
            """Accept everything."""

        async def sent(serving: Any) -> Response:
            held = await serving
            await held({"type": "http"}, None, send)
            return held._reply

        serve = endpoint("/waiting", waiting, models, None if is_open else models.keys)
        first = [asyncio.create_task(sent(serve(request))) for _ in range(2)]
        await asyncio.sleep(0)
        third = asyncio.create_task(serve(request))
        await asyncio.sleep(0)
        assert third.done() != is_open
        may_end.set()
        assert [(await one).status_code for one in first] == [200, 200]
        reply = (await third)._reply
        assert reply.status_code == (200 if is_open else 429)
        assert is_open or reply.headers["retry-after"] == "1"
        assert (await sent(serve(request))).status_code == 200, "what was sent counts no more"

    asyncio.run(run())


def test_a_replys_bytes_count_until_it_is_sent(server: Any) -> None:
    service: Any = copy.copy(server.service)
    service.limits = Limits(dataclasses.replace(service.settings, max_logprob_bytes=250_000))
    models: Any = copy.copy(service.models)
    models.first = service
    request: Any = SimpleNamespace(
        headers={}, query_params={}, client=None, method="GET", scope={CALL: Call("")}
    )

    async def little(*_: Any) -> Response:
        return Response(b"ok")

    async def large(*_: Any) -> Response:
        return Response(bytes(100_000))

    async def send(_: Any) -> None:
        """Accept everything."""

    async def run() -> None:
        serve = endpoint("/large", large, models, models.keys)
        held = [await serve(request) for _ in range(3)]
        assert [one._reply.status_code for one in held] == [200, 200, 429]
        assert service.limits.in_use()["logprob_bytes"] == 200_000
        small = await endpoint("/small", little, models, models.keys)(request)
        figures = await endpoint("/metrics", large, models, models.keys)(request)
        statuses = [small._reply.status_code, figures._reply.status_code]
        assert statuses == [200, 200], "as /health is, however full the server"
        for one in (*held, small, figures):
            await one({"type": "http"}, None, send)
        assert service.limits.in_use()["logprob_bytes"] == 0

    asyncio.run(run())


def test_bodies_that_do_not_come_count_as_work(serve_process: Any) -> None:
    with serve_process("--max-requests", "2", "--max-waiting", "0") as server, ExitStack() as stack:
        header = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        links = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        for link in map(stack.enter_context, links):
            link.sendall(f"{header}Content-Length: 100\r\n\r\n".encode())

        def is_full() -> bool:
            return bool(server.post("/v1/completions", prompt="the cat", max_tokens=1).status == 429)

        eventually(is_full, "a third is served beside two")
        assert server.get("/health").status == server.get("/v1/models").status == 200
        for link in links:
            link.close()
        eventually(lambda: not is_full(), "their places are never given back")
