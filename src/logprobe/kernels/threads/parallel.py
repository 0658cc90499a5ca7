"""Compiled CPU workers, run on the threads that torch already keeps.

torch's operators run on a pool of OpenMP threads (libgomp) that spin for a while after each operator. A
second pool, such as Numba's own, fights with it for the cores. So the workers here are started on torch's
pool, through the entry point that compiled OpenMP code itself uses. Where torch has no libgomp (macOS,
Windows), plain Python threads run the same workers.

A worker is compiled once, by Numba, and takes items from a counter that all threads share::

    @compiled_worker()                                 # names the other modules that its code comes from
    def worker(task):                                  # task: (TASK_FIELDS,) int64
        item = next_item(task)                         # each item in [0, num_items) exactly once
        while item >= 0:
            row = float32_at(task[2] + 4 * task[3] * item, task[3])
            for column in range(row.size):
                row[column] *= 2.0
            item = next_item(task)

    parallel_for(worker(), [rows.data_ptr(), num_columns], num_items=num_rows)

The numbers in the list arrive as `task[2:]`. Workers must not raise: check before the launch. Which thread
takes which item is not fixed, so an item's result must depend on the item alone. Scratch memory that a
worker makes with `np.empty` is its own.

Machine code is kept on disk by Numba, beside the file of the worker's body. Numba asks only whether that one
file has changed; the digest of all others stands in a closure's cell, which is part of the cache's key.

Before it: the kernels' checked arguments. After it: the processor.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import cfunc, types
from numba.core.registry import cpu_target
from numba.np.numpy_support import carray

from logprobe.kernels import hooks
from logprobe.kernels.threads.intrinsics import FLOAT, LINE, fetch_add, internal, pointer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

OMP_PAUSE_HARD = 2  # OpenMP 5.0, 3.6
SIGNATURE = types.void(types.voidptr)
THREAD_ITEMS = 4  # of a loop for each, where it can be cut so finely: all end at nearly the same time
TASK_FIELDS = 32  # int64 a task holds at most: next item, number of items, 30 of the kernel's own


@dataclass(frozen=True, slots=True)
class Worker:
    """One compiled C function `void(void*)`."""

    cfunc: Any  # Numba's CFunc, the owner of the machine code
    run: Callable[[int], None]  # calls it in this thread, without the GIL
    address: int
    is_from_cache: bool


class WorkerOf:
    """Gives the worker of a body; the first call compiles it, or reads it from the disk."""

    def __init__(self, body: Any, name: str, sources: list[str]) -> None:
        self._body, self._name, self._sources = body, name, sources
        self._worker: Worker | None = None
        self.__doc__ = body.__doc__

    def __call__(self) -> Worker:
        """The one worker of this process."""
        if self._worker is None:
            self._worker = _compile(self._start())
        return self._worker

    def disk_cache(self) -> DiskCache | None:
        """Where its machine code lies, or will lie; None where no folder can be written."""
        return DiskCache.of(self._start())

    def _start(self) -> FunctionType:
        return _start_function(self._body, self._name, _digest(inspect.getfile(self._body), *self._sources))


@dataclass(frozen=True, slots=True)
class DiskCache:
    """Numba's disk cache of one worker."""

    folder: Path
    is_filled: bool

    @classmethod
    def of(cls, start: FunctionType) -> DiskCache | None:
        """That of a worker's start; None where there is no folder for it."""
        try:
            cache = hooks.CACHE.find()(start)
        except RuntimeError:
            return None
        codegen = cpu_target.target_context.codegen()
        name = cache._cache_file._load_index().get(cache._index_key(SIGNATURE, codegen))  # noqa: SLF001
        folder = Path(cache.cache_path)
        return cls(folder, is_filled=name is not None and (folder / name).is_file())


def compiled_worker(*modules: ModuleType, name: str = "") -> Callable[[Callable[[Any], None]], WorkerOf]:
    """Make of a worker's body, `body(task)`, what compiles it once and gives the worker.

    Args:
        modules: those besides the body's own and this folder's whose code or constants the body is made of.
        name: told apart by it are workers whose bodies are the same lines of one file; what such a body
            calls and is made anew for each worker needs `compiled(name)`.
    """
    sources = [str(module.__file__) for module in modules]

    return lambda body: WorkerOf(body, name or body.__qualname__, sources)


def compiled(name: str) -> Callable[[Callable[..., Any]], Any]:
    """`internal` for a function that is made several times from the same lines, under a name of its own.

    Numba tells such functions apart by a number that counts within a process. Machine code that two processes
    have written to the disk cache may thus hold two functions of one name, and a third process, which loads
    both, would call the first for the second.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        function.__qualname__ = name
        return internal(function)

    return decorate


def _compile(start: FunctionType) -> Worker:
    """Compile a worker, or load it from Numba's disk cache where none of its source files has changed."""
    try:
        c_function: Any = cfunc(SIGNATURE, cache=True)(start)
    except RuntimeError:  # no folder that a cache could be written to
        c_function = cfunc(SIGNATURE, cache=False)(start)
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(c_function.address)
    return Worker(c_function, run, c_function.address, bool(c_function.cache_hits))


def _digest(*sources: str) -> int:
    """Of this folder's files and others: what compiled code may come from."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), *map(Path, sources)]
    return functools.reduce(lambda digest, file: zlib.crc32(file.read_bytes(), digest), files, 0)


def _start_function(body: FunctionType, name: str, digest: int) -> FunctionType:
    """`void(void*)` in Python: what calls `_body`, to Numba's cache a function of the body's file and place.

    The body itself must not be in the closure: Numba would find another key for it in every process.
    """

    def start(address: Any) -> None:
        if digest >= 0:
            _body(task_at(address))

    code = start.__code__.replace(
        co_filename=body.__code__.co_filename,
        co_firstlineno=body.__code__.co_firstlineno,
        co_name=name,
        co_qualname=name,
    )
    names = {"__name__": body.__module__, "_body": compiled(f"{name}_body")(body), "task_at": task_at}
    return FunctionType(code, names, name, closure=start.__closure__)


def _body(task: Any) -> None:
    """Stands for the body in the text of `start`; each worker's start has its own."""


def parallel_for(
    worker: Worker, context: Sequence[int], num_items: int, *, num_threads: int | None = None
) -> None:
    """Runs `worker` until each item in [0, num_items) is done, each exactly once; releases the GIL.

    Args:
        worker: what a `compiled_worker` gives.
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


@internal
def task_at(address: Any) -> Any:
    """The (TASK_FIELDS,) int64 task that a worker was started with."""
    return carray(address, (TASK_FIELDS,), np.int64)


@internal
def next_item(task: Any) -> Any:
    """The next item that no thread has taken, or -1 when all are."""
    item = fetch_add(task.ctypes.data, 1)
    return item if item < task[1] else -1


@internal
def float32_at(address: Any, size: Any) -> Any:
    """`size` float32 at an address, as an array."""
    return carray(pointer(address), (size,), np.float32)


@internal
def float32_on_lines(size: Any) -> Any:
    """Room for float32 that begins with a cache line: no vector of it lies in two."""
    memory = np.empty(size + LINE // FLOAT, np.float32)
    return memory[-memory.ctypes.data % LINE // FLOAT :][:size]


@internal
def int32_at(address: Any, size: Any) -> Any:
    """`size` int32 at an address, as an array."""
    return carray(pointer(address), (size,), np.int32)


@internal
def int64_at(address: Any, size: Any) -> Any:
    """`size` int64 at an address, as an array."""
    return carray(pointer(address), (size,), np.int64)


@internal
def uint16_at(address: Any, size: Any) -> Any:
    """`size` uint16 at an address, as an array: also the bits of float16 and bfloat16."""
    return carray(pointer(address), (size,), np.uint16)


@internal
def uint8_at(address: Any, size: Any) -> Any:
    """`size` uint8 at an address, as an array: also booleans."""
    return carray(pointer(address), (size,), np.uint8)
