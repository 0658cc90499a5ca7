"""This measures how rows come from an engine's process to the front: by message, in shared memory, by queue.

Rows and bytes a second from one process to another, read on arrival: 32 requests with 20 alternatives a
token, and 4 with the whole vocabulary, over our messages, our shared memory, whichever of the two the engine
chooses (ours), a `multiprocessing.Queue` of lists of dicts, and what vLLM's engine core sends to its front.
Then single blocks there and back, by size: the size from which shared memory is the faster is `SHARED_BYTES`.
The last lines are a table.
"""

import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Protocol

import transport_worker
import zmq
from harness import OURS, Arena, Contestant, Figure, Options, Target, alternate, parse_options, publish

from logprobe.transport.channel import Channel
from logprobe.transport.codec import SHARED_BYTES, Codec, parts_of_rows
from logprobe.transport.messages import Delta
from logprobe.transport.shm import PageReader, num_bytes, unnamed_file

MESSAGES, SHARED, QUEUE = "messages alone", "shared memory alone", "multiprocessing.Queue of lists of dicts"
VLLM = "vllm_transport"
BATCH, TOP = 32, 20
VOCABULARY = 49_152
KS = (20, 8_000, 16_000, VOCABULARY - 1, 151_935)  # the last: Qwen's vocabulary
NUM_TURNS = 60


class Way(Protocol):
    """One way from process to process."""

    def measure(self, num_rows: int, k: int, num_steps: int, number: int) -> float:
        """Rows a second."""


class ByQueue:
    """What most programs do."""

    def __init__(self, queue: Any, orders: Any) -> None:
        self._queue, self._orders = queue, orders

    def measure(self, num_rows: int, k: int, num_steps: int, _number: int) -> float:
        """Rows a second; each is read."""
        start = time.perf_counter()
        self._orders.put((num_rows, k, num_steps))
        for _ in range(num_steps):
            for row in self._queue.get():
                assert len(row) == k + 1
                assert next(iter(row.values()))[0] < 0
        return num_rows * num_steps / (time.perf_counter() - start)


class ByChannel:
    """Our channel, of which rows of `shared_bytes` and more lie in shared memory."""

    def __init__(self, link: Any, orders: Any, shared_bytes: int) -> None:
        self._link, self._orders, self._shared_bytes = link, orders, shared_bytes

    def measure(self, num_rows: int, k: int, num_steps: int, _number: int) -> float:
        """Rows a second; each is read."""
        start = time.perf_counter()
        self._orders.put((num_rows, k, num_steps, self._shared_bytes))
        for _ in range(num_steps):
            for delta in self._link.receive(60.0):
                assert delta.raw.token_ids.shape == (1, k + 1)
                assert delta.raw.logprobs[0, 0] < 0
        return num_rows * num_steps / (time.perf_counter() - start)


class FileHandle:
    """A descriptor that can be handed to a process as it is started."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __getstate__(self) -> Any:
        return DupFd(self._descriptor)

    def __setstate__(self, handle: Any) -> None:
        self.detach = handle.detach


@contextmanager
def worker(target: Any, *given: Any) -> Iterator[Any]:
    """A process that sends what it is ordered to, until the end of the block: its queue of orders."""
    context = multiprocessing.get_context("spawn")
    orders = context.SimpleQueue()
    process = context.Process(target=target, args=(*given, orders), daemon=True)
    process.start()
    try:
        yield orders
    finally:
        orders.put(None)
        process.join()


@contextmanager
def queue_way() -> Iterator[dict[str, Way]]:
    """The rival's process."""
    queue = multiprocessing.get_context("spawn").Queue()
    with worker(transport_worker.send_by_queue, queue) as orders:
        yield {QUEUE: ByQueue(queue, orders)}


@contextmanager
def channel_ways() -> Iterator[dict[str, Way]]:
    """Our own process, three ways."""
    own, others = socket.socketpair()
    file = unnamed_file()
    context: zmq.Context[Any] = zmq.Context()
    with tempfile.TemporaryDirectory() as folder, own, others:
        events: Codec[Any] = Codec(list[Delta], reader=PageReader(file))
        link = Channel.bind(context, Path(folder), events, own)
        with worker(transport_worker.send_by_channel, folder, others, FileHandle(file)) as orders:
            link.wait_for_peer()
            sizes = {OURS: SHARED_BYTES, MESSAGES: sys.maxsize, SHARED: 0}
            yield {name: ByChannel(link, orders, size) for name, size in sizes.items()}
        link.close()
    context.term()
    os.close(file)


class ByRival:
    """What a rival's engine process sends."""

    def __init__(self, arena: Arena, contestant: Contestant) -> None:
        self._arena, self._contestant = arena, contestant

    def measure(self, num_rows: int, k: int, num_steps: int, _number: int) -> float:
        """Rows a second; each is read."""
        asked = {"num_rows": num_rows, "k": k, "num_steps": num_steps}
        [seconds] = self._arena.ask(self._contestant, "rows", [asked])["timings_s"]
        return num_rows * num_steps / seconds


def row_figures(arena: Arena) -> list[Figure]:
    """Rows and bytes a second of each way."""
    found, options = [], arena.options
    rivals = {name: ByRival(arena, one) for name, one in arena.labels(VLLM).items()}
    with channel_ways() as ours, queue_way() as queue:
        ways: dict[str, Way] = {**ours, **queue, **rivals}
        targets = [Target(against=name, at_least=1.0) for name in (QUEUE, *rivals)]
        for num_rows, k, num_steps in ((BATCH, TOP, 400), (4, VOCABULARY - 1, 25)):
            many = max(num_steps // 20, 1) if options.is_smoke else num_steps
            for way in ways.values():
                way.measure(num_rows, k, max(many // 10, 1), 0)  # warms up
            contestants = {name: partial(way.measure, num_rows, k, many) for name, way in ways.items()}
            samples, notes = alternate(contestants, options.rounds)
            notes += arena.missing(VLLM)
            what = "the whole vocabulary" if k > TOP else f"{k} alternatives"
            common: dict[str, Any] = {"better": "higher", "notes": notes}
            rows = Figure(name=f"rows with {what}", unit="rows/s", samples=samples, targets=targets, **common)
            size = 8 * (k + 1) / 1e6
            moved = {name: [size * rate for rate in rates] for name, rates in samples.items()}
            name = f"ids and log-probabilities of rows with {what}"
            found += [rows, Figure(name=name, unit="MB/s", samples=moved, **common)]
    return found


def block_figures(options: Options) -> list[Figure]:
    """Microseconds from an order to the last number of a block of one row, read on arrival."""
    found = []
    with channel_ways() as ways:
        for k in KS[:1] if options.is_smoke else KS:
            contestants = {name: partial(latency_us, way, k) for name, way in ways.items()}
            samples, notes = alternate(contestants, options.rounds)
            size = num_bytes(parts_of_rows(transport_worker.rows(1, k)))
            name = f"a block of {k:,} alternatives ({size / 1000:,.1f} kB), there and back"
            found.append(Figure(name=name, unit="us", better="lower", samples=samples, notes=notes))
    return found


def latency_us(way: Way, k: int, number: int) -> float:
    """The median of many turns: one order, one row."""
    return statistics.median(1e6 / way.measure(1, k, 1, number) for _ in range(NUM_TURNS))


def page_lines(blocks: Sequence[Figure]) -> Iterator[str]:
    """The lines of a table of blocks."""
    for figure in blocks:
        message, shared = (statistics.median(figure.samples[name]) for name in (MESSAGES, SHARED))
        what = figure.name.removeprefix("a block of ").removesuffix(", there and back")
        yield f"| {what} | {message:,.0f} | {shared:,.0f} | {shared / message:.2f} |"


def main() -> None:
    """Race the ways."""
    options = parse_options(__doc__ or "")
    with Arena(options) as arena:
        rows, blocks = row_figures(arena), block_figures(options)
    publish(Path(__file__).stem, [*rows, *blocks], options)
    if not options.is_smoke:
        print(*page_lines(blocks), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
