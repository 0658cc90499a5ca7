"""A server with an engine process: it survives the engine's death, and lets requests finish on SIGTERM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMIT_S = 300  # generous, also for a process that starts on a busy machine


@pytest.fixture
def server(settings: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with serving(settings) as started:
        yield started


@contextmanager
def serving(
    settings: dict[str, Any], *flags: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `logprobe serve --engine-process` and yield the process and its address."""
    words = [
        "--engine-process",
        "--port",
        "0",
        "--kv-cache-memory-bytes",
        "8388608",
        "--served-model-name",
        "tiny",
    ]
    words += ["--drain-s", str(LIMIT_S), *flags]
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", "logprobe", "serve", settings["model"], *words],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )
    assert process.stderr is not None
    try:
        yield process, next(line.split()[-1] for line in process.stderr if line.startswith("listening on"))
    finally:
        process.kill()
        process.communicate()


def test_a_server_whose_engine_cannot_start_says_why_and_when_to_come_back(
    settings: dict[str, Any], tmp_path: Path, until: Callable[[Callable[[], bool]], None]
) -> None:
    own = tmp_path / "tmp"
    own.mkdir()
    with serving(settings, TMPDIR=str(own)) as (process, url):
        [engine] = psutil.Process(process.pid).children()
        with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
            assert client.get("/ready").status_code == 200
            own.rmdir()
            os.kill(engine.pid, signal.SIGKILL)
            until(lambda: "cannot be started" in client.get("/ready").text)
            for reply in (client.get("/ready"), client.post("/v1/completions", json=body(3, stream=False))):
                assert reply.status_code == 503
                assert reply.json()["error"]["code"] == "engine_unavailable"
                assert str(own) in reply.json()["error"]["message"]
                assert int(reply.headers["Retry-After"]) > 0
            own.mkdir()
            until(lambda: client.get("/ready").status_code == 200)
            assert client.post("/v1/completions", json=body(3, stream=False)).status_code == 200


def body(num_tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "prompt": [5, 6],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "stream": stream,
    }


def test_the_server_outlives_its_engine_and_drains_before_it_goes(
    server: tuple[subprocess.Popen[str], str], until: Callable[[Callable[[], bool]], None]
) -> None:
    process, url = server
    [engine] = psutil.Process(process.pid).children()
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        assert client.get("/v1/capabilities").json()["num_processes"] == 1
        with client.stream("POST", "/v1/completions", json=body(4000, stream=True)) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(engine.pid, signal.SIGKILL)
            assert any("was killed by SIGKILL" in line for line in lines)
        assert client.get("/health").status_code == 200
        reply = client.post("/v1/completions", json=body(3, stream=False))  # waits for the restarted process
        assert reply.status_code == 200, reply.text
        assert "logprobe_engine_restarts_total 1.0" in client.get("/metrics").text
        [engine] = psutil.Process(process.pid).children()
        with client.stream("POST", "/v1/completions", json=body(600, stream=True)) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            engine.send_signal(signal.SIGTERM)  # as when a process group is terminated
            events = [line for line in lines if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in events[-2] + events[-3]
    assert process.wait(LIMIT_S) == 0
    until(lambda: not engine.is_running())


def engines_of(server: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(server.pid).children()


def test_an_engine_process_that_is_stopped_is_told_to_every_waiter_and_goes_on(
    settings: dict[str, Any], until: Callable[[Callable[[], bool]], None]
) -> None:
    with (
        serving(settings, "--stall-s", "3") as (process, url),
        httpx.Client(base_url=url, timeout=LIMIT_S) as client,
    ):
        [engine] = engines_of(process)
        until(lambda: client.get("/ready").json() == {"status": "ready"})
        expected = client.post("/v1/completions", json=body(300, stream=False)).json()["choices"]
        with client.stream("POST", "/v1/completions", json=body(4000, stream=True)) as reply:
            lines = reply.iter_lines()
            next(lines)
            engine.suspend()
            try:
                [error] = [json.loads(line[6:])["error"] for line in lines if '"error"' in line]
                assert error["code"] == "engine_stuck"
                asked = [client.post("/v1/completions", json=body(3, stream=False))]
                for told in [*map(client.get, ("/health", "/ready")), *asked]:
                    assert (told.status_code, told.json()["error"]["code"]) == (503, "engine_stuck")
            finally:
                engine.resume()
        until(lambda: client.get("/ready").json() == {"status": "ready"})
        reply = client.post("/v1/completions", json=body(300, stream=False))
        assert reply.json()["choices"] == expected
        assert engines_of(process) == [engine], "it was not started again"


def test_a_replica_that_is_stopped_leaves_the_server_well_and_goes_with_it(
    settings: dict[str, Any], until: Callable[[Callable[[], bool]], None]
) -> None:
    with (
        serving(settings, "--stall-s", "3", "--data-parallel-size", "2") as (process, url),
        httpx.Client(base_url=url, timeout=LIMIT_S) as client,
    ):
        engines = engines_of(process)
        expected = client.post("/v1/completions", json=body(9, stream=False)).json()["choices"]
        engines[0].suspend()

        def silent_s() -> int:
            match = re.search(r"replica [01] has not answered for (\d+) s", client.get("/ready").text)
            return int(match[1]) if match else 0

        until(lambda: silent_s() > 3)  # `stall_s`
        assert client.get("/health").status_code == 200
        for _ in range(4):
            reply = client.post("/v1/completions", json=body(9, stream=False))
            assert reply.json()["choices"] == expected
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
        assert all(not engine.is_running() for engine in engines)
