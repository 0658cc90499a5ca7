"""The processor that kernels are compiled for: this machine's, or the one that Numba is told of.

`NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` choose another, by which one kind of machine runs, or only compiles,
what the other kind would. Before it: the environment. After it: widths of vectors, and keys of caches. What a
start needs is read without LLVM, whose library takes longer to load than all else that stands here.
"""

from __future__ import annotations

import functools
import os
from itertools import takewhile
from pathlib import Path
from typing import Final

FLOAT, DOUBLE = 4, 8  # bytes
LINE = 64  # bytes of a cache line
_MODEL: Final = ("vendor_id", "cpu family", "model", "stepping")  # Linux' names of what LLVM goes by


def cpu_name() -> str:
    """LLVM's name of the processor."""
    if told := os.environ.get("NUMBA_CPU_NAME"):
        return told
    from llvmlite import binding as llvm

    return str(llvm.get_host_cpu_name())


@functools.cache
def cpu_features() -> frozenset[str]:
    """Names of the instructions that code may use, Linux' or LLVM's: those asked for here are alike."""
    if told := os.environ.get("NUMBA_CPU_FEATURES"):
        return frozenset(name[1:] for name in told.split(",") if name.startswith("+"))
    if flags := _facts().get("flags"):
        return frozenset(flags.split())
    from llvmlite import binding as llvm

    return frozenset(name for name, is_there in llvm.get_host_cpu_features().items() if is_there)


def machine_key() -> list[str]:
    """What tells processors apart for which other machine code is made."""
    told, facts = os.environ.get("NUMBA_CPU_NAME"), _facts()
    known = [facts[name] for name in _MODEL if name in facts]
    return [*([told] if told else known or [cpu_name()]), *sorted(cpu_features())]


@functools.cache
def _facts() -> dict[str, str]:
    """What Linux tells of an x86-64 processor, of one of the cores; nothing elsewhere."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            core = [line.partition(":") for line in takewhile(str.strip, lines)]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in core}


HAS_WIDE_REGISTERS: Final = "avx512f" in cpu_features()
