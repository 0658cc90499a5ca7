"""The number of threads that the CPU kernels use."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

VARIABLE: Final = "OMP_NUM_THREADS"
_CPUS: Final = Path("/sys/devices/system/cpu")
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: microseconds per period, or `max`; and the period
_OLD_QUOTA: Final = Path("/sys/fs/cgroup/cpu")  # cgroup v1

_number: int | None = None


def num_threads() -> int:
    """Return the number of threads that kernels use in this process.

    By default, this is `OMP_NUM_THREADS`, or else the number of cores that the process may use.
    """
    global _number  # noqa: PLW0603 - one setting per process
    if _number is None:
        _number = _default_number()
    return _number


def set_num_threads(number: int) -> None:
    """Set the number of threads of kernels in this process, and of torch if it is loaded."""
    global _number  # noqa: PLW0603
    _number = number
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(number)


def _default_number() -> int:
    asked = os.environ.get(VARIABLE, "").partition(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    cores = num_cores()
    return cores if (quota := _quota()) is None else max(1, min(cores, int(quota)))


def num_cores() -> int:
    """Return the number of cores that this process may use; threads of the same core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = set()
    for cpu in cpus:
        try:
            cores.add((_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return len(cpus)
    return len(cores)


def _quota() -> float | None:
    """Return the number of CPUs that the container's limit allows; None: no limit."""
    with suppress(OSError, ValueError):
        limit, period = _QUOTA.read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    with suppress(OSError, ValueError):
        limit, period = (
            (_OLD_QUOTA / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
        )
        return int(limit) / int(period) if int(limit) > 0 else None
    return None
