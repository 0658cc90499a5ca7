"""Launch native kernels, one or many at once, on the thread pool of the native library.

A step with one token runs hundreds of kernels that take a few microseconds each, and a launch from Python
takes about as long as a kernel. So a step's kernels are recorded once and launched together, like a CUDA
graph. `native/threads.cpp` runs them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels import threads
from logprobe.kernels.arrays import as_array
from logprobe.kernels.native import declarations, library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.kernels.arrays import Array

THREAD_ITEMS = 4  # desired work items per thread, so that all threads end at nearly the same time
_DTYPES = {
    "float": (np.float32,),
    "double": (np.float64,),
    "int32_t": (np.int32,),
    "int64_t": (np.int64,),
    "uint8_t": (np.uint8, np.bool_),
}


class Stage:
    """A kernel with its arguments; can be run repeatedly.

    Args:
        kernel: name of the kernel, without the prefix `logprobe_`.
        structure: name of the kernel's argument struct in `native/kernels.h`.
        num_items: number of work items, which threads share.
        is_small: `run` uses one thread, because waking others would take longer.
        **fields: values of the struct's fields: a number; an array (or CPU tensor), to which the stage keeps
            a reference; or None for a null pointer. The strides `x_row` and `x_head` of an array `x` are set
            automatically.
    """

    def __init__(
        self, kernel: str, structure: str, *, num_items: int, is_small: bool = False, **fields: Any
    ) -> None:
        self.kernel, self.num_items, self.is_small, self.fields = kernel, num_items, is_small, fields
        ffi, names = declarations(), _fields(structure)
        values: dict[str, Any] = {"work": {"num_items": num_items}}
        for name, value in fields.items():
            kind = names[name]
            if not kind or value is None:
                values[name] = ffi.NULL if kind else value
                continue
            array = as_array(value)
            values[name] = _address(name, array, kind)
            if f"{name}_row" in names:
                values[f"{name}_row"] = array.strides[0] // array.itemsize
            if f"{name}_head" in names:
                values[f"{name}_head"] = array.strides[1] // array.itemsize
        self._args = ffi.new(f"{structure} *", values)
        self.call = (getattr(library().functions, f"logprobe_{kernel}"), self._args, 0)

    def run(self, *, num_threads: int | None = None) -> None:
        """Run the kernel and wait until it is done, without holding the GIL.

        Raises:
            MemoryError: scratch memory cannot be allocated.
        """
        if self.is_small:
            num_threads = 1
        elif num_threads is None:
            num_threads = threads.num_threads()
        _launch(_calls([self]), 1, min(num_threads, self.num_items))


class Series:
    """Stages that run in one launch; can be run repeatedly."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = list(stages)  # keeps the memory of their arguments alive
        self._calls = _calls(self._stages)

    def run(self) -> None:
        """Run the stages one after another, and wait until all are done, without holding the GIL.

        Raises:
            MemoryError: scratch memory cannot be allocated.
        """
        _launch(self._calls, len(self._stages), threads.num_threads())


def _calls(stages: list[Stage]) -> Any:
    return declarations().new("Stage[]", [stage.call for stage in stages])


def _launch(calls: Any, num_stages: int, num_threads: int) -> None:
    if library().functions.logprobe_run(calls, num_stages, num_threads):
        raise MemoryError("a kernel cannot allocate its scratch memory")


@functools.cache
def _fields(structure: str) -> dict[str, str]:
    """Return the field names of a struct, each with the type that the field points to ("" for a number)."""
    fields = declarations().typeof(structure).fields
    return {name: field.type.item.cname if field.type.kind == "pointer" else "" for name, field in fields}


def _address(name: str, array: Array, kind: str) -> Any:
    assert kind == "void" or array.dtype in _DTYPES[kind], (name, array.dtype)
    return declarations().cast("void *", array.__array_interface__["data"][0])


def items_for_threads() -> int:
    """Return the number of work items to split a loop into: THREAD_ITEMS per thread, or 1 for one thread."""
    num_threads = threads.num_threads()
    return THREAD_ITEMS * num_threads if num_threads > 1 else 1


def block_rows(num_rows: int, most: int) -> int:
    """Return the number of rows per work item: at most `most`, and few enough that every thread gets work."""
    return max(1, min(most, num_rows // threads.num_threads()))
