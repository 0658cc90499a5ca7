"""The multiply-adds that this machine does at most: float32, in registers, on all threads."""

import time

import numpy as np

from logprobe.kernels.native import library
from logprobe.kernels.stages import Stage

SUMS = 12  # vectors, as in native/peak.cpp
NUM_TURNS = 50_000  # of each item
NUM_ITEMS = 64
TIMES = 20
LINE = 64  # bytes of a cache line


def multiply_adds_per_s() -> float:
    """Those of one second, by the best of some runs of milliseconds: others may use the machine."""
    lines = np.empty((NUM_ITEMS, LINE), dtype=np.int8).view(np.float32)
    stage = Stage("peak", "PeakArgs", num_items=NUM_ITEMS, factors=lines, num_turns=NUM_TURNS)
    best_s = float("inf")
    for _ in range(TIMES):
        lines[:] = 0.5
        started = time.perf_counter()
        stage.run()
        best_s = min(best_s, time.perf_counter() - started)
    return NUM_ITEMS * NUM_TURNS * SUMS * library().functions.logprobe_num_lanes() / best_s
