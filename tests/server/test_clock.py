"""A wall clock that jumps by a day: durations, deadlines and limits do not depend on it."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import logprobe
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

DAY_S = 86_400
SERVER = """
import itertools, time
plain, days = time.time, itertools.cycle([1, -1])
time.time = lambda: plain() + 86_400 * next(days)
time.time_ns = lambda: int(1e9 * time.time())
from logprobe.cli import command
command()
"""
# Uses of the wall clock: dates of replies, reports and chat templates, and comparisons with file times.
WALL_CLOCK = {
    "models/cache.py": 1,
    "analysis/auditing/run.py": 1,
    "server/service.py": 2,
    "text/templates.py": 1,
}


def test_nothing_else_reads_the_wall_clock() -> None:
    package = Path(logprobe.__file__).parent
    found: dict[str, int] = {}
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if name in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today"}:
                place = file.relative_to(package).as_posix()
                found[place] = found.get(place, 0) + 1
    assert found == WALL_CLOCK


@contextmanager
def serving(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = [
        "serve",
        str(model),
        "--port",
        "0",
        "--kv-cache-memory-bytes",
        "8388608",
        "--stall-s",
        str(PATIENCE_S),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, *words, "--drain-s", str(PATIENCE_S)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stderr is not None
    try:
        yield process, next(line.split()[-1] for line in process.stderr if line.startswith("listening on"))
    finally:
        process.kill()
        process.communicate()


def test_a_server_whose_clock_jumps_answers_counts_and_drains(tiny_model_folder: Path) -> None:
    body = {"prompt": [5, 6], "max_tokens": 100, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    chat = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 3}
    with (
        serving(tiny_model_folder) as (process, url),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        first, again = (client.post("/v1/completions", json=body).json()["choices"] for _ in range(2))
        assert first == again
        # Its template has a time limit.
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        seconds = {
            sample.name: sample.value
            for family in text_string_to_metric_families(client.get("/metrics").text)
            for sample in family.samples
            if sample.name.endswith(("seconds_sum", "seconds_total"))
        }
        assert "logprobe_queue_seconds_sum" in seconds
        assert {name: value for name, value in seconds.items() if not 0 <= value < DAY_S / 2} == {}
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            lines = reply.iter_lines()
            texts = [json.loads(next(lines)[6:])["choices"][0]["text"]]
            process.send_signal(signal.SIGTERM)
            data = [line[6:] for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        texts += [choice["text"] for line in data[:-1] for choice in json.loads(line)["choices"]]
        assert "".join(texts) == first[0]["text"]
        assert process.wait(PATIENCE_S) == 0


@pytest.fixture(autouse=True)
def _needs_signals() -> None:
    if sys.platform == "win32":
        pytest.skip("Windows ends a process that gets SIGTERM at once")
