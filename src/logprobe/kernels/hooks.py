"""Every private part of another library that is used here: what it does, and what happens where it is gone.

Private names may leave with any release. Each is looked up here and nowhere else, and a test looks up all, so
that a release which drops one is named by the test and not by a crash. Where a hook is missing on a machine,
what stands in `without` happens.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One private name of a library."""

    library: str  # an importable module, or LIBGOMP
    name: str  # dotted, from there
    purpose: str
    without: str

    def find(self) -> Any:
        """What the name stands for; None where it is gone."""
        if self.library == LIBGOMP:
            path = libgomp()
            return None if path is None else getattr(ctypes.CDLL(path), self.name, None)
        try:
            return attrgetter(self.name)(import_module(self.library))
        except AttributeError:
            return None


LIBGOMP = "libgomp"

PARALLEL = Hook(
    library=LIBGOMP,
    name="GOMP_parallel",
    purpose="runs a compiled worker on the threads that torch already keeps",
    without="plain Python threads run the workers, and the stages of a series are launched one by one",
)
PAUSE = Hook(
    library=LIBGOMP,
    name="omp_pause_resource_all",
    purpose="ends the threads that a thread of ours no longer needs",
    without="they stay, and outnumber the cores where several engines ran",
)
ATTENTION = Hook(
    library="transformers",
    name="AttentionInterface.register",
    purpose="hands each layer's attention to the pool; decoders pass our options through to it",
    without="no model can be loaded",
)
LLVM_FUNCTIONS = Hook(
    library="numba.core.cgutils",
    name="get_or_insert_function",
    purpose="declares LLVM's functions on vectors, which llvmlite's own way refuses",
    without="the kernels do not compile",
)

LLVM_NAMES = Hook(
    library="llvmlite.binding.ffi",
    name="lib._fntab",
    purpose="has llvmlite's library answer to `__dict__` by a dict, and not by a function as to any name",
    without="vLLM on a CPU, which reads that of all names of all modules, starts no worker in this process",
)

HOOKS = (PARALLEL, PAUSE, ATTENTION, LLVM_FUNCTIONS, LLVM_NAMES)


def missing_hooks() -> list[Hook]:
    """Those that this machine's libraries do not have."""
    return [hook for hook in HOOKS if hook.find() is None]


def libgomp() -> str | None:
    """The path of the OpenMP library that torch has loaded, its own before another."""
    import_module("torch")
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    loaded = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    return min(loaded, key=lambda path: ("torch" not in path, path), default=None)
