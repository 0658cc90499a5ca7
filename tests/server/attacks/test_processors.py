"""Processors that raise process-ending exceptions, or that hang."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

PROCESSOR = "hostile_processors:FaultyLogitsProcessor"
BODY = {"prompt": "the cat", "max_tokens": 3, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def faulty(serve_process: Any) -> Iterator[Any]:
    """A server with a processor that fails on request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        with serve_process("--logits-processors", PROCESSOR) as server:
            yield server


@pytest.mark.parametrize("fault", ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "RecursionError"])
@pytest.mark.parametrize("where", ["apply", "update_state", "check_args"])
def test_whatever_a_processor_raises_ends_its_own_request_alone(faulty: Any, where: str, fault: str) -> None:
    reply = faulty.post("/v1/completions", logits_processors_args={where: fault}, **BODY)
    assert reply.status == 500
    assert "FaultyLogitsProcessor" in reply.error["message"]
    assert faulty.get("/health").status == 200
    faulty.check_alive()


def test_neighbours_of_a_failing_request_go_on(faulty: Any) -> None:
    replies: list[Any] = []
    wanted = faulty.post("/v1/completions", **BODY | {"max_tokens": 60}).data

    def ask() -> None:
        replies.append(faulty.post("/v1/completions", **BODY | {"max_tokens": 60}))

    neighbour = threading.Thread(target=ask)
    neighbour.start()
    for _ in range(5):
        args = {"apply": "SystemExit"}
        assert faulty.post("/v1/completions", logits_processors_args=args, **BODY).status == 500
    neighbour.join()
    texts = [json.loads(data)["choices"][0]["text"] for data in (wanted, replies[0].data)]
    assert texts[0] == texts[1]


def test_an_engine_that_hangs_is_told_and_every_waiter_ends(serve_process: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        with serve_process("--logits-processors", PROCESSOR, "--stall-s", "1") as server:
            assert server.get("/ready").status == 200

            def ask(is_stream: bool) -> Any:
                args = {"hang": True}
                return server.post("/v1/completions", logits_processors_args=args, stream=is_stream, **BODY)

            start = time.monotonic()
            with ThreadPoolExecutor() as threads:
                reply, streamed = threads.map(ask, [False, True])
            assert time.monotonic() - start < ServerSettings().stall_s
            assert reply.status == 503
            assert reply.error["code"] == "engine_stuck"
            assert b"engine_stuck" in streamed.data
            assert server.get("/health").status == 503
            assert server.get("/ready").status == 503
            later = server.post("/v1/completions", **BODY)
            assert later.status == 503
