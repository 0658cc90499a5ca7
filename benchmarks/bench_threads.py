"""This measures what threads that share a step cost, and computes from it how many a replica should have.

Measured: the time of a stage in which every thread has one row to norm and nothing else (taking it, and the
wait until all are done), by number of threads; and the bytes a second that two threads read from memory.
Computed: a step of one row on T threads as `bytes / (T · bandwidth of a core) + stages · stage(T)`, where a
stage takes longer in proportion to its threads (each takes the counter's line in its turn), and every core
reads as fast as one of the two does. Machines of many cores have less bandwidth a core, so that the rates of
all replicas together are bounds. The last lines are a table.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from harness import OURS, Figure, alternate, number, parse_options, publish
from machine import read_bandwidth

from logprobe.kernels.layers.rows import norm_stage
from logprobe.kernels.stages import Series
from logprobe.kernels.threads import set_num_threads

NUM_STAGES, WIDTH = 1000, 16
STAGES_A_LAYER = 8
MODELS = {"0.1 GB in 30 layers": (1e8, 30), "2.5 GB in 16": (2.5e9, 16), "16 GB in 32": (1.6e10, 32)}
CORES = (8, 32, 64)


def stage_us(num_threads: int, _number: int) -> float:
    """Microseconds of a stage of one row a thread: the best of some series, as others may use the machine."""
    set_num_threads(num_threads)
    rows, weight = torch.ones(num_threads, WIDTH), torch.ones(WIDTH)
    series = Series([norm_stage(rows, weight, torch.empty_like(rows), 1e-5) for _ in range(NUM_STAGES)])
    times = []
    for _ in range(30):
        started = time.perf_counter()
        series.run()
        times.append(time.perf_counter() - started)
    return 1e6 * min(times) / NUM_STAGES


def bandwidth_gb(_number: int) -> float:
    """GB a second that two threads read."""
    return read_bandwidth() / 1e9


def step_s(num_bytes: float, layers: int, threads: int, core_bandwidth: float, stage_s: float) -> float:
    """Seconds of a step of one row; `stage_s` is a stage's on two threads."""
    waits = 0.0 if threads == 1 else layers * STAGES_A_LAYER * stage_s * threads / 2
    return num_bytes / (threads * core_bandwidth) + waits


def page_lines(core_bandwidth: float, stage_s: float) -> Iterator[str]:
    """The lines of a table: tokens a second of one request, and of one in each replica."""
    for cores in CORES:
        for replicas in sorted({1, cores // 8, cores // 4, cores // 2}):
            cells = [str(cores), str(replicas), str(cores // replicas)]
            for num_bytes, layers in MODELS.values():
                rate = 1 / step_s(num_bytes, layers, cores // replicas, core_bandwidth, stage_s)
                cells.append(f"{number(rate)} / {number(replicas * rate)}")
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure both, and print the table."""
    options = parse_options(__doc__ or "")
    counts = [count for count in (1, 4, 8, 16, 32, 64) if count <= (os.cpu_count() or 1)]
    others = {f"{count} threads": partial(stage_us, count) for count in counts}
    stages, _ = alternate({OURS: partial(stage_us, 2)} | others, options.rounds)
    speeds, _ = alternate({OURS: bandwidth_gb}, options.rounds)
    stage = "a stage of one row a thread; ours: 2 threads"
    figures = [
        Figure(name=stage, unit="microseconds", better="lower", samples=stages),
        Figure(name="bytes that two threads read", unit="GB/s", better="higher", samples=speeds),
    ]
    publish(Path(__file__).stem, figures, options)
    core_bandwidth = statistics.median(speeds[OURS]) * 1e9 / 2
    lines = page_lines(core_bandwidth, statistics.median(stages[OURS]) / 1e6)
    print(*lines, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
