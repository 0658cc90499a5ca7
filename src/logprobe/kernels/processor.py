"""The processor that kernels are compiled for: this machine's, or the one that Numba is told of.

`NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` choose another, by which one kind of machine runs, or only compiles,
what the other kind would. Before it: the environment. After it: widths of vectors, and keys of caches.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from llvmlite import binding as llvm
from numba import config as numba_config

config: Any = numba_config  # fills its module from the environment


def cpu_name() -> str:
    """LLVM's name of the processor."""
    return str(config.CPU_NAME or llvm.get_host_cpu_name())


@functools.cache
def cpu_features() -> frozenset[str]:
    """LLVM's names of the instructions that code may use."""
    told = config.CPU_FEATURES
    if told is None:
        return frozenset(name for name, is_there in llvm.get_host_cpu_features().items() if is_there)
    return frozenset(name[1:] for name in told.split(",") if name.startswith("+"))


HAS_WIDE_REGISTERS: Final = "avx512f" in cpu_features()
