"""Run `logprobe serve` in a subprocess, for tests that need a real process."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# Freezes lasted seconds to minutes; benchmarks/bench_attacks.py requires 100 ms on an idle machine.
WORST_HEALTH_S = 1.0
MAX_GROWTH_BYTES = 32 << 20  # what imports, compiled grammars and allocator arenas keep
PATIENCE_S = 180  # timeout for a busy machine


@dataclass
class Reply:
    """An HTTP reply."""

    status: int
    data: bytes

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.data)["error"]
        return found


@dataclass
class Attacked:
    """A server subprocess and its address."""

    process: subprocess.Popen[str]
    port: int
    log: list[str] = field(default_factory=list)  # lines written since it listens

    def send(self, path: str, data: bytes, **headers: str) -> Reply:
        """Post raw bytes."""
        return self.ask("POST", path, data, **{"Content_Type": "application/json"} | headers)

    def post(self, path: str, **body: Any) -> Reply:
        return self.send(path, json.dumps(body).encode())

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, **headers)

    def ask(self, method: str, path: str, data: bytes | None = None, **headers: str) -> Reply:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            told = {name.replace("_", "-"): text for name, text in headers.items()}
            link.request(method, path, data, told)
            with link.getresponse() as reply:
                return Reply(reply.status, reply.read())
        finally:
            link.close()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process (SIGSTOP) during the block, so that it gets all that arrives meanwhile at once."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            is_still = psutil.Process(self.process.pid)
            eventually(lambda: is_still.status() == psutil.STATUS_STOPPED, "the server goes on")
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @property
    def memory_bytes(self) -> int:
        return int(self._memory().rss)

    def check_alive(self) -> None:
        assert self.process.poll() is None, f"the server died: {self.process.returncode}"
        assert self.post("/v1/completions", prompt="the cat", max_tokens=2).status == 200

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Poll `/health` during the block: each reply must be fast, and the server must survive.

        Its memory must return to the level before.
        """
        stop, latencies, before = threading.Event(), [], self._memory()

        def ask() -> None:
            while not (latencies and stop.wait(0.01)):
                latencies.append(self._health_s())

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert latencies, "the health was never told"
        assert max(latencies) < WORST_HEALTH_S, f"the health took {max(latencies):.2f} s"
        self.check_alive()
        most = own_bytes(before) + MAX_GROWTH_BYTES
        eventually(lambda: own_bytes(self._memory()) < most, "the memory does not come back")

    def _memory(self) -> Any:
        return psutil.Process(self.process.pid).memory_info()

    def _health_s(self) -> float:
        """Return the latency of `/health`, less the time that threads of both processes waited for a core."""
        pids = self.process.pid, os.getpid()
        start, before = time.perf_counter(), waits_ns(*pids)
        assert self.get("/health").status == 200
        waited_ns = sum(wait - before.get(thread, 0) for thread, wait in waits_ns(*pids).items())
        return time.perf_counter() - start - waited_ns / 1e9


def own_bytes(memory: Any) -> int:
    """Return a process's private memory; file-backed pages are up to the system."""
    return int(memory.rss - memory.shared)


def waits_ns(*pids: int) -> dict[Path, int]:
    """Return how long each thread of these processes has been runnable but not running, in total."""
    found = {}
    for thread in (one for pid in pids for one in Path(f"/proc/{pid}/task").iterdir()):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found[thread] = int((thread / "schedstat").read_text().split()[1])
    return found


def eventually(is_so: Callable[[], bool], otherwise: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


@contextmanager
def serving_process(
    folder: Path,
    *flags: str,
    python: Path = Path(sys.executable),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Attacked]:
    """Run `logprobe serve` on a free port during the block; another `python` imports it from `src`."""
    command = [str(python), "-c", "from logprobe.cli import command; command()", "serve", str(folder)]
    source = str(Path(__file__).parents[1] / "src")
    path = {} if python == Path(sys.executable) else {"PYTHONPATH": source}
    process = subprocess.Popen(
        [*command, "--port", "0", "--kv-cache-memory-bytes", "2000000", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **path, **(environment or {})},
    )
    assert process.stderr is not None
    log: list[str] = []
    drain = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    try:
        line = next((line for line in process.stderr if "listening" in line), "")
        drain.start()
        match = re.search(r":(\d+)$", line.strip())
        assert match is not None, "it never listened"
        yield Attacked(process, int(match[1]), log)
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)
        drain.join()
        process.stderr.close()
