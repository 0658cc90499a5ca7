"""HTTP servers under test, ours and vLLM's: each in a process of its own, started and ended here."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from process import ENVIRONMENTS, RIVALS, THREADS, RivalError

TOP = 20
START_LIMIT_S = 240
# Below those that a system hands out: one of these may be another's by the time that a server has started.
PORTS = range(20_000, 32_768)
MODEL_NAME = "m"  # what every server calls the model
_COMMON_ENVIRONMENT = {
    "OMP_NUM_THREADS": str(THREADS),
    "MKL_NUM_THREADS": str(THREADS),
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """How to start a server; `{port}` in its words stands for the port."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None  # where it runs; None: where this process does
    start_limit_s: float = START_LIMIT_S


@dataclass
class Served:
    """A server that runs, and the gaps between tokens seen in its streams."""

    url: str
    gaps_ms: list[float] = field(default_factory=list)
    group: int = 0  # of its processes

    def cpu_s(self) -> float:
        """Processor time that the server's processes have used so far."""
        ticks = 0
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = status.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.group:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def open(self, path: str, body: Mapping[str, Any], **headers: str) -> HTTPResponse:
        """Send one JSON request."""
        request = urllib.request.Request(  # noqa: S310 - always our own address
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        )
        reply: HTTPResponse = urllib.request.urlopen(request, timeout=600)  # noqa: S310
        return reply

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """One JSON request and its reply."""
        with self.open(path, body) as reply:
            return json.load(reply)


def our_program(folder: Path, *options: str) -> Program:
    """`logprobe serve`."""
    entry = str(Path(sys.executable).with_name("logprobe"))
    return Program(
        words=(entry, "serve", str(folder), "--port", "{port}", "--served-model-name", MODEL_NAME, *options)
    )


def vllm_program(folder: Path) -> Program:
    """VLLM's server, compiled, with the logprobs it needs let through."""
    rival = RIVALS["vllm"]
    entry = (str(rival.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder))
    given = ("--port", "{port}", "--served-model-name", MODEL_NAME, "--dtype", "float32")
    limits = ("--max-model-len", "2048", "--max-logprobs", str(TOP))
    return Program(words=(*entry, *given, *limits), environment=rival.environment)


@contextlib.contextmanager
def serving(program: Program) -> Iterator[Served]:
    """Start a server, wait until it is well, and end it with all its children."""
    port = _free_port()
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [word.replace("{port}", str(port)) for word in program.words],
            env={**os.environ, **_COMMON_ENVIRONMENT, **program.environment},
            cwd=program.folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            served = Served(f"http://127.0.0.1:{port}", group=process.pid)
            _await_health(served, process, program.start_limit_s)
            yield served
        finally:
            _end(process)


def _free_port() -> int:
    while True:
        port = random.choice(PORTS)  # noqa: S311 - no secret
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_health(served: Served, process: subprocess.Popen[bytes], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RivalError(f"{served.url}: the server ended with code {process.returncode} at its start")
        try:
            with urllib.request.urlopen(f"{served.url}/health", timeout=5):  # noqa: S310
                return
        except OSError:
            time.sleep(0.05)
    raise RivalError(f"{served.url}: the server was not ready in {limit_s:g} s")
