"""Launch native kernels, one or many at once, on the thread pool of the native library.

A step with one token runs hundreds of kernels that take a few microseconds each, and a launch from Python
takes about as long as a kernel. So a step's kernels are recorded once and launched together, like a CUDA
graph. `native/threads.cpp` runs them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.kernels.native import declarations, library

if TYPE_CHECKING:
    from collections.abc import Sequence

THREAD_ITEMS = 4  # desired work items per thread, so that all threads end at nearly the same time
_DTYPES = {
    "float": (torch.float32, np.float32),
    "double": (torch.float64, np.float64),
    "int32_t": (torch.int32, np.int32),
    "int64_t": (torch.int64, np.int64),
    "uint8_t": (torch.uint8, torch.bool, np.uint8, np.bool_),
}


class Stage:
    """A kernel with its arguments; can be run repeatedly.

    Args:
        kernel: name of the kernel, without the prefix `logprobe_`.
        structure: name of the kernel's argument struct in `native/kernels.h`.
        num_items: number of work items, which threads share.
        is_small: `run` uses one thread, because waking others would take longer.
        **fields: values of the struct's fields: a number; a tensor or array, to which the stage keeps a
            reference; or None for a null pointer. The strides `x_row` and `x_head` of an array `x` are set
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
            values[name] = _address(name, value, kind) if kind else value
            if f"{name}_row" in names and value is not None:
                values[f"{name}_row"] = _stride(value, 0)
            if f"{name}_head" in names:
                values[f"{name}_head"] = _stride(value, 1)
        self._args = ffi.new(f"{structure} *", values)
        self.call = (getattr(library().functions, f"logprobe_{kernel}"), self._args, 0)

    def run(self, *, num_threads: int | None = None) -> None:
        """Run the kernel and wait until it is done, without holding the GIL.

        Raises:
            MemoryError: scratch memory cannot be allocated.
        """
        threads = torch.get_num_threads() if num_threads is None else num_threads
        _launch(_calls([self]), 1, 1 if self.is_small else min(threads, self.num_items))


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
        _launch(self._calls, len(self._stages), torch.get_num_threads())


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


def _stride(value: Any, dim: int) -> int:
    stride = value.stride(dim) if isinstance(value, torch.Tensor) else value.strides[dim] // value.itemsize
    return int(stride)


def _address(name: str, value: Any, kind: str) -> Any:
    ffi = declarations()
    if value is None:
        return ffi.NULL
    assert kind == "void" or value.dtype in _DTYPES[kind], (name, value.dtype)
    is_tensor = isinstance(value, torch.Tensor)
    return ffi.cast("void *", value.data_ptr() if is_tensor else value.__array_interface__["data"][0])


def items_for_threads() -> int:
    """Return the number of work items to split a loop into: THREAD_ITEMS per thread, or 1 for one thread."""
    num_threads = torch.get_num_threads()
    return THREAD_ITEMS * num_threads if num_threads > 1 else 1


def block_rows(num_rows: int, most: int) -> int:
    """Return the number of rows per work item: at most `most`, and so few that every thread gets work."""
    return max(1, min(most, num_rows // torch.get_num_threads()))
