"""`logprobe serve` in a process of its own, for tests of what only a process can show."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Freezes lasted seconds to minutes. benchmarks/bench_attacks.py holds an idle machine to 100 ms.
WORST_HEALTH_S = 1.0  # that pass while the server computes: what else the machine does is not its own doing
WORST_WAIT_S = 20.0  # that pass at all
MOST_GROWTH = 1.1
DEADLINE_S = 240


@dataclass
class Reply:
    """What came back."""

    status: int
    data: bytes

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.data)["error"]
        return found


@dataclass
class Attacked:
    """A server's process and its address."""

    process: subprocess.Popen[str]
    port: int

    def send(self, path: str, data: bytes, *, timeout_s: float = 240, **headers: str) -> Reply:
        """Post bytes as they are."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            told = {"Content-Type": "application/json"} | {
                name.replace("_", "-"): value for name, value in headers.items()
            }
            link.request("POST", path, data, told)
            reply = link.getresponse()
            return Reply(reply.status, reply.read())
        finally:
            link.close()

    def post(self, path: str, **body: Any) -> Reply:
        return self.send(path, json.dumps(body).encode())

    def get(self, path: str, **headers: str) -> Reply:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        try:
            link.request(
                "GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()}
            )
            reply = link.getresponse()
            return Reply(reply.status, reply.read())
        finally:
            link.close()

    @property
    def computed_s(self) -> float:
        """Processor time that it has taken, s."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def check_alive(self) -> None:
        assert self.process.poll() is None, f"the server died: {self.process.returncode}"
        assert self.post("/v1/completions", prompt="the cat", max_tokens=2).status == 200

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ask for the health all the time: it must come soon each time, and the server outlive the block.

        Its memory must come back to what it was.
        """
        stop, before = threading.Event(), self.memory_bytes
        latencies: list[tuple[float, float]] = []  # s: in all, and of them computed

        def ask() -> None:
            while not (latencies and stop.wait(0.01)):
                start, computed_s = time.perf_counter(), self.computed_s
                assert self.get("/health").status == 200
                latencies.append((time.perf_counter() - start, self.computed_s - computed_s))

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert latencies, "the health was never told"
        assert max(map(min, latencies)) < WORST_HEALTH_S, f"the health took {max(map(min, latencies)):.2f} s"
        assert max(latencies)[0] < WORST_WAIT_S, f"the health came after {max(latencies)[0]:.2f} s"
        self.check_alive()
        eventually(lambda: self.memory_bytes < MOST_GROWTH * before, "the memory does not come back")


def eventually(is_so: Callable[[], bool], otherwise: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


@contextmanager
def serving_process(folder: Path, *flags: str) -> Iterator[Attacked]:
    """Run `logprobe serve` on a free port until the block ends."""
    command = [sys.executable, "-c", "from logprobe.cli import command; command()", "serve", str(folder)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--kv-bytes", "2000000", *flags], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    try:
        line = next((line for line in process.stderr if "listening" in line), "")
        drain.start()
        match = re.search(r":(\d+)$", line.strip())
        assert match is not None, "it never listened"
        yield Attacked(process, int(match[1]))
    finally:
        process.terminate()
        process.wait(timeout=240)
        drain.join()
        process.stderr.close()
