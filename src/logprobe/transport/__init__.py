"""Transport of log-probability rows from the engine to readers, between devices, threads and processes.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names

if TYPE_CHECKING:
    from logprobe.compat.collector import StreamingLogprobsCollector
    from logprobe.transport.copy import AsyncCPUTransfer

__all__ = ["AsyncCPUTransfer", "StreamingLogprobsCollector"]

_HOMES = {"AsyncCPUTransfer": ".copy", "StreamingLogprobsCollector": "logprobe.compat.collector"}

__getattr__ = lazy_names(__name__, _HOMES)
