"""Compiled CPU workers, run on the threads that torch already keeps.

torch's operators run on a pool of OpenMP threads (libgomp) that spin for a while after each operator. A
second pool, such as Numba's own, fights with it for the cores. So the workers here are started on torch's
pool, through the entry point that compiled OpenMP code itself uses. Where torch has no libgomp (macOS,
Windows), plain Python threads run the same workers.

A kernel is named by its room and the file of its loops, "layers.norm" of `layers/numba/norm.py`; what the
file makes several of has a further part, "layers.panels.bfloat16". Only who compiles opens those files.

Before it: the kernels' checked arguments. After it: the processor.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.kernels import hooks
from logprobe.kernels.machine_code import StoredCode, linked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OMP_PAUSE_HARD = 2  # OpenMP 5.0, 3.6
THREAD_ITEMS = 4  # of a loop for each, where it can be cut so finely: all end at nearly the same time
TASK_FIELDS = 32  # int64 a task holds at most: next item, number of items, 30 of the kernel's own


@dataclass(frozen=True, slots=True)
class Worker:
    """One C function `void(void*)` in this process."""

    address: int
    run: Callable[[int], None]  # calls it in this thread, without the GIL
    is_from_cache: bool
    keeps: Any  # the owner of its memory

    @classmethod
    def of(cls, code: bytes, *, is_from_cache: bool = False) -> Worker:
        """That of an object."""
        address, memory = linked(code)
        return cls(address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), is_from_cache, memory)


class WorkerOf:
    """Gives the worker of a name; the first call links or compiles it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._worker: Worker | None = None

    def __call__(self) -> Worker:
        """The one worker of this process."""
        if self._worker is None:
            code = StoredCode(self.name).read()
            self._worker = Worker.of(code or self.compile(), is_from_cache=code is not None)
        return self._worker

    def is_stored(self) -> bool:
        """Whether its machine code lies on the disk."""
        return StoredCode(self.name).is_there()

    def compile(self) -> bytes:
        """Make its machine code, and keep it on the disk."""
        room, module, *part = self.name.split(".")
        bodies = import_module(f"logprobe.kernels.{room}.numba.{module}")
        body = bodies.body_of(*part) if part else bodies.worker
        code: bytes = body.machine_code()
        StoredCode(self.name).write(code)
        return code


@functools.cache
def worker_of(name: str) -> WorkerOf:
    """The one of a name."""
    return WorkerOf(name)


def parallel_for(
    worker: Worker, context: Sequence[int], num_items: int, *, num_threads: int | None = None
) -> None:
    """Runs `worker` until each item in [0, num_items) is done, each exactly once; releases the GIL.

    Args:
        worker: what a `WorkerOf` gives.
        context: at most 30 integers (addresses and sizes) that the worker finds in `task[2:]`; the caller
            keeps the memory behind the addresses alive.
        num_items: how many items there are.
        num_threads: torch's number by default. Keep it: libgomp ends its surplus threads when it is asked
            for fewer, and starts them anew when torch then asks for more. 1 runs in the calling thread.
    """
    task = np.empty(TASK_FIELDS, dtype=np.int64)
    task[0], task[1] = 0, num_items
    task[2 : 2 + len(context)] = context
    threads = torch.get_num_threads() if num_threads is None else num_threads
    if threads <= 1 or num_items <= 1:
        worker.run(task.ctypes.data)
    elif (launch := _openmp_launch()) is not None:
        launch(worker.address, task.ctypes.data, threads, 0)
    else:
        _run_on_python_threads(worker, task.ctypes.data, min(threads, num_items))


@dataclass(frozen=True, slots=True)
class Stage:
    """One loop that is ready to run: `parallel_for`'s arguments, and the memory behind its addresses."""

    worker: Worker
    context: Sequence[int]
    num_items: int
    keeps: tuple[Any, ...]
    is_small: bool = False  # starting the threads for it alone would cost more than they save

    def run(self, *, num_threads: int | None = None) -> None:
        """Run the loop by itself."""
        parallel_for(
            self.worker, self.context, self.num_items, num_threads=1 if self.is_small else num_threads
        )


def items_for_threads() -> int:
    """How many items a loop is worth being cut into: several a thread, where there are several threads."""
    num_threads = torch.get_num_threads()
    return THREAD_ITEMS * num_threads if num_threads > 1 else 1


def block_rows(num_rows: int, most: int) -> int:
    """Rows of an item of a loop whose rows take equally long: at most so many, and some for every thread."""
    return max(1, min(most, num_rows // torch.get_num_threads()))


def thread_pool() -> str:
    """Which threads the workers run on: 'openmp' (torch's own) or 'python'."""
    return "python" if _openmp_launch() is None else "openmp"


def release_threads() -> None:
    """End the OpenMP threads that wait for the calling thread; its next parallel operator starts them anew.

    libgomp keeps threads for every thread that ever ran an operator. Where they outnumber the cores, none
    spins between operators any more, and each operator must wake the others first (docs/decisions.md).
    """
    pause = hooks.PAUSE.find()
    if pause is not None:
        pause(OMP_PAUSE_HARD)


def _run_on_python_threads(worker: Worker, address: int, num_threads: int) -> None:
    helpers = [threading.Thread(target=worker.run, args=(address,)) for _ in range(num_threads - 1)]
    for helper in helpers:
        helper.start()
    worker.run(address)
    for helper in helpers:
        helper.join()


@functools.cache
def _openmp_launch() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the libgomp that torch has loaded: it runs a function on a team of threads."""
    launch: Any = hooks.PARALLEL.find()
    if launch is not None:
        launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        launch.restype = None
    return launch  # type: ignore[no-any-return]
