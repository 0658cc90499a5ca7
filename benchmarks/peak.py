"""The multiply-adds that this machine does at most: float32, in registers, on all of torch's threads."""

import time
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from logprobe.kernels.layers.numba.widen import FLOATS, INT32, INTS, LANES, fused
from logprobe.kernels.threads.numba.intrinsics import LINE, intrinsic
from logprobe.kernels.threads.numba.tasks import next_item
from logprobe.kernels.threads.numba.workers import compiled_worker
from logprobe.kernels.threads.parallel import parallel_for

SUMS = 12  # vectors, each of which waits for itself alone: more than are in flight, and all in registers
NUM_TURNS = 50_000  # of each item
NUM_ITEMS = 64
TIMES = 20


@intrinsic
def _multiply_adds(_typing: Any, _num_turns: Any, _place: Any) -> Any:
    """So often a product and a sum in each lane of SUMS vectors, from the float at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        num_turns, address = arguments
        place = builder.inttoptr(address, ir.FloatType().as_pointer())
        factor = builder.load(place)  # not known when it is compiled, so that nothing is worked out then
        nothing = ir.Constant(FLOATS, ir.Undefined)
        first = builder.insert_element(nothing, factor, INT32(0))
        every = builder.shuffle_vector(first, nothing, ir.Constant(INTS, [0] * LANES))
        sums = [cgutils.alloca_once_value(builder, every) for _ in range(SUMS)]  # type: ignore[no-untyped-call]
        for number, total in enumerate(sums):
            builder.store(builder.fmul(every, ir.Constant(FLOATS, [float(number)] * LANES)), total)
        with cgutils.for_range(builder, num_turns):
            for total in sums:
                builder.store(fused(builder, builder.load(total), every, every), total)
        whole = builder.load(sums[0])
        for total in sums[1:]:
            whole = builder.fadd(whole, builder.load(total))
        builder.store(builder.extract_element(whole, INT32(0)), place)

    return types.void(types.int64, types.int64), generate


@compiled_worker
def worker(task: Any) -> None:
    """Items of NUM_TURNS turns each."""
    item = next_item(task)
    while item >= 0:
        _multiply_adds(task[2], task[3] + LINE * item)
        item = next_item(task)


def multiply_adds_per_s() -> float:
    """Those of one second, by the best of some runs of milliseconds: others may use the machine."""
    lines = np.empty((NUM_ITEMS, LINE), dtype=np.int8).view(np.float32)
    best_s = float("inf")
    for _ in range(TIMES):
        lines[:] = 0.5
        started = time.perf_counter()
        parallel_for(worker(), [NUM_TURNS, lines.ctypes.data], NUM_ITEMS)
        best_s = min(best_s, time.perf_counter() - started)
    return NUM_ITEMS * NUM_TURNS * SUMS * LANES / best_s
