"""The loop of `threads.series`."""

from __future__ import annotations

from typing import Any

from logprobe.kernels.processor import LINE
from logprobe.kernels.threads.numba.intrinsics import (
    call_with_number,
    call_with_task,
    counted,
    fetch_add,
    pause,
)
from logprobe.kernels.threads.numba.tasks import int64_at
from logprobe.kernels.threads.numba.workers import compiled_worker
from logprobe.kernels.threads.parallel import TASK_FIELDS

(TASKS, WORKERS, INSIDE, NUM_STAGES, YIELD, SLEEP) = range(2, 8)  # addresses but for the number of stages
TASK_BYTES = 8 * TASK_FIELDS
SPINS, YIELDS = 200, 1000  # turns of a wait up to which it spins, and up to which it yields; measured
SLEEP_US = 50  # between two looks after those


@compiled_worker
def worker(task: Any) -> None:
    """Every stage in turn, in every thread."""
    workers = int64_at(task[WORKERS], task[NUM_STAGES])
    for number in range(task[NUM_STAGES]):
        stage, inside = task[TASKS] + TASK_BYTES * number, task[INSIDE] + LINE * number
        if counted(stage) < counted(stage + 8):  # else all are taken
            fetch_add(inside, 1)
            call_with_task(workers[number], stage)
            fetch_add(inside, -1)
        turns = 0
        while counted(inside) != 0:
            turns += 1
            if turns <= SPINS:
                pause()
            elif turns <= YIELDS:
                call_with_number(task[YIELD], 0)
            else:
                call_with_number(task[SLEEP], SLEEP_US)
