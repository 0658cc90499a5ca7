"""Many stages in one launch (CPU): each thread goes through all of them, and waits for the others after each.

A step of one token is hundreds of loops of a few microseconds, and starting one from Python costs as much
as it takes. Recorded once, they are started together, as a CUDA graph does for a GPU's kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.kernels.threads.intrinsics import call_alone, call_with_task
from logprobe.kernels.threads.parallel import (
    TASK_FIELDS,
    barrier_address,
    compiled_worker,
    int64_at,
    parallel_for,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.kernels.threads.parallel import Stage

(TASKS, WORKERS, NUM_STAGES, BARRIER) = range(2, 6)  # addresses but for the number
TASK_BYTES = 8 * TASK_FIELDS


class Series:
    """Stages whose addresses stay valid, ready to run again and again."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = list(stages)  # they keep the memory
        self._tasks = np.zeros((len(self._stages), TASK_FIELDS), dtype=np.int64)
        self._workers = np.array([stage.worker.address for stage in self._stages], dtype=np.int64)
        for task, stage in zip(self._tasks, self._stages, strict=True):
            task[1] = stage.num_items
            task[2 : 2 + len(stage.context)] = stage.context

    def run(self) -> None:
        """Run every stage, each after the one before it is done; releases the GIL."""
        barrier = barrier_address()
        if barrier is None:
            for stage in self._stages:
                stage.run(num_threads=1)
            return
        self._tasks[:, 0] = 0
        context = [self._tasks.ctypes.data, self._workers.ctypes.data, len(self._stages), barrier]
        # An item a thread, none of which is counted: every thread runs the whole series.
        parallel_for(worker(), context, torch.get_num_threads())


@compiled_worker()
def worker(task: Any) -> None:
    """Every stage in turn, in every thread."""
    workers = int64_at(task[WORKERS], task[NUM_STAGES])
    for number in range(task[NUM_STAGES]):
        call_with_task(workers[number], task[TASKS] + TASK_BYTES * number)
        call_alone(task[BARRIER])
