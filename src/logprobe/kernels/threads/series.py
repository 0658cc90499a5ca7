"""Many stages in one launch (CPU): each thread goes through all of them, and waits till each is done.

A step of one token is hundreds of loops of a few microseconds, and starting one from Python costs as much
as it takes. Recorded once, they are started together, as a CUDA graph does for a GPU's kernels.

A stage is done when all its items are taken and no thread is inside it: a thread that the system has put
aside is waited for where it may hold an item, and nowhere else. OpenMP's own barrier waits for every thread,
whatever it holds, and spins for milliseconds where threads do not outnumber cores (libgomp, GOMP_SPINCOUNT).
Who waits here spins briefly, then yields its core to whoever has work, and sleeps where that is long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from logprobe.kernels.machine_code import c_function
from logprobe.kernels.processor import LINE
from logprobe.kernels.threads.parallel import TASK_FIELDS, parallel_for, thread_pool, worker_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.kernels.threads.parallel import Stage

worker = worker_of("threads.series")


class Series:
    """Stages whose addresses stay valid, ready to run again and again."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = list(stages)  # they keep the memory
        self._tasks = np.zeros((len(self._stages), TASK_FIELDS), dtype=np.int64)
        # How many threads are inside a stage, each on a line of the cache of its own.
        self._inside = np.zeros((len(self._stages), LINE // 8), dtype=np.int64)
        self._workers = np.array([stage.worker.address for stage in self._stages], dtype=np.int64)
        for task, stage in zip(self._tasks, self._stages, strict=True):
            task[1] = stage.num_items
            task[2 : 2 + len(stage.context)] = stage.context
        self._fresh = self._tasks.copy()  # stages may count in theirs

    def run(self) -> None:
        """Run every stage, each after the one before it is done; releases the GIL."""
        if thread_pool() == "python":
            for stage in self._stages:
                stage.run(num_threads=1)
            return
        self._tasks[:] = self._fresh
        context = [
            *(array.ctypes.data for array in (self._tasks, self._workers, self._inside)),
            len(self._stages), c_function("sched_yield"), c_function("usleep"),
        ]  # fmt: skip
        # An item a thread, none of which is counted: every thread runs the whole series.
        parallel_for(worker(), context, torch.get_num_threads())
