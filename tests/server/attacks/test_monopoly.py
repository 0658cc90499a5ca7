"""One client that requests as much as possible, and another one that needs little."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.server.http.errors import ApiError
from logprobe.server.http.workers import MAX_JOBS, Workers
from logprobe.server.limits import InProgress
from server_process import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server_process import Attacked

KEYS = ("--api-key", "hog", "--api-key", "other")
LAYOUTS = {"thread": (), "process": ("--engine-process",), "two replicas": ("--data-parallel-size", "2")}
LONG = {"max_tokens": 700, "ignore_eos": True, "temperature": 1}
# Fills `max_requests` (512) for as long as the model's context allows, in so many calls.
HOGS: dict[str, tuple[int, dict[str, Any]]] = {
    "four calls": (4, {"prompt": "the cat", "n": 128, **LONG}),
    "many calls": (64, {"prompt": "the cat", "n": 8, **LONG}),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def keyed(request: pytest.FixtureRequest, serve_process: Callable[..., Any]) -> Iterator[Attacked]:
    """A server with two keys and no long queues."""
    with serve_process(*KEYS, "--wait-timeout-s", "0.2", *LAYOUTS[request.param]) as server:
        yield server


@contextmanager
def hogged(server: Attacked, name: str) -> Iterator[list[socket.socket]]:
    """The connections of a client that has used up the limit."""
    count, body = HOGS[name]
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer hog\r\n"
    whole = f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    with ExitStack() as stack:
        links = []
        for _ in range(count):
            link = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE_S))
            link.sendall(whole)
            links.append(link)
        eventually(lambda: in_use(server) == 512, "it is not full")
        yield links


def in_use(server: Attacked) -> int:
    told = server.get("/v1/capabilities", Authorization="Bearer other")
    found: int = json.loads(told.data)["in_use"]["requests"]
    return found


def asked(server: Attacked, key: str, **body: Any) -> int:
    data = json.dumps({"prompt": "the cat", "max_tokens": 3, **body}).encode()
    return server.send("/v1/completions", data, Authorization=f"Bearer {key}").status


@pytest.mark.parametrize("name", HOGS)
def test_another_client_is_served_while_one_has_all_there_is(keyed: Attacked, name: str) -> None:
    with hogged(keyed, name):
        for _ in range(3):
            assert asked(keyed, "other") == 200
        assert in_use(keyed) > 256  # most of the hog's tokens are still to be generated
    eventually(lambda: in_use(keyed) == 0, "its requests go on")


def test_a_client_alone_has_all_there_is_and_no_more(keyed: Attacked) -> None:
    with hogged(keyed, "four calls"):
        assert asked(keyed, "other", n=8) == 200
        assert asked(keyed, "other", n=9) == 429  # more than the reserve
        assert asked(keyed, "hog") == 429
    eventually(lambda: in_use(keyed) == 0, "its requests go on")


def test_another_client_is_served_while_requests_of_one_wait(serve_process: Callable[..., Any]) -> None:
    with (
        serve_process(*KEYS, "--max-waiting", "8", "--wait-timeout-s", str(PATIENCE_S)) as server,
        ThreadPoolExecutor(8) as clients,
    ):
        with hogged(server, "four calls"):
            waiting = [clients.submit(asked, server, "hog") for _ in range(8)]
            eventually(lambda: num_queued(server) == 8, "they do not wait")
            for _ in range(3):
                assert asked(server, "other") == 200
            assert asked(server, "hog") == 429
            assert num_queued(server) == 8
        assert [one.result() for one in waiting] == [200] * 8


def num_queued(server: Attacked) -> int:
    text = server.get("/metrics", Authorization="Bearer other").data.decode()
    return int(float(text.partition("\nlogprobe_queued_requests ")[2].partition("\n")[0]))


def half_sent(server: Attacked, stack: ExitStack) -> None:
    """Open a connection of the hog and send half a body."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer hog\r\n"
    link = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE_S))
    link.sendall(f'{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"prompt":'.encode())


def test_another_client_is_served_while_one_has_half_sent_all_its_bodies(
    serve_process: Callable[..., Any],
) -> None:
    with (
        serve_process(
            *KEYS, "--max-requests", "12", "--max-waiting", "4", "--body-timeout-s", "600"
        ) as server,
        ExitStack() as stack,
    ):
        for _ in range(16):
            half_sent(server, stack)
        eventually(lambda: asked(server, "hog") == 429, "it has not begun all there may be")
        for _ in range(3):
            assert asked(server, "other") == 200
        assert asked(server, "hog") == 429


def test_what_is_in_progress_has_a_reserve_for_callers_that_hold_little() -> None:
    in_progress = InProgress(512, "requests")
    with ExitStack() as stack:
        for _ in range(512):
            stack.enter_context(in_progress.hold("hog"))
        for caller in ("hog", "hog"):
            with pytest.raises(ApiError, match="512 of 512"):
                stack.enter_context(in_progress.hold(caller))
        with ExitStack() as others:
            for number in range(8):
                for _ in range(8):
                    others.enter_context(in_progress.hold(f"other{number}"))
            with pytest.raises(ApiError, match="576 of 512"):
                others.enter_context(in_progress.hold("one more"))
        stack.enter_context(in_progress.hold("one more"))
    with in_progress.hold("hog"):
        pass


def test_bodies_that_wait_to_be_read_have_a_reserve_too() -> None:
    async def fill() -> list[str]:
        workers, is_over = Workers(), threading.Event()
        jobs = [asyncio.ensure_future(workers.read(is_over.wait, None, "hog")) for _ in range(MAX_JOBS)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="waiting to be decoded"):
            await workers.read(str, None, "hog")
        other = asyncio.ensure_future(workers.read(lambda: "read", None, "other"))
        await asyncio.sleep(0)
        is_over.set()
        await asyncio.gather(*jobs)
        return [await other]

    assert asyncio.run(fill()) == ["read"]
