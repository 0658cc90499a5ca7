"""Exact token log-probabilities from open-weights language models.

A request passes through the modules in this order: `cli` → `llm` → `engine` → `models`, `sampling` →
`kernels` → `records`. The names below are imported on first use, so that `import logprobe` is fast.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names
from logprobe._version import __version__

if TYPE_CHECKING:
    from logprobe.analysis import Score as Score
    from logprobe.config import CacheConfig as CacheConfig
    from logprobe.config import EngineConfig as EngineConfig
    from logprobe.config import LoadConfig as LoadConfig
    from logprobe.config import ParallelConfig as ParallelConfig
    from logprobe.config import SchedulerConfig as SchedulerConfig
    from logprobe.engine.request import CompletionOutput as CompletionOutput
    from logprobe.engine.request import RequestOutput as RequestOutput
    from logprobe.errors import LogprobeError as LogprobeError
    from logprobe.integrations.remote.llm import RemoteLLM as RemoteLLM
    from logprobe.llm import LLM as LLM
    from logprobe.llm import AsyncLLM as AsyncLLM
    from logprobe.records import FlatLogprobs as FlatLogprobs
    from logprobe.records import Logprob as Logprob
    from logprobe.sampling import SamplingParams as SamplingParams

if "free-threading" in sys.version:
    raise ImportError(
        "logprobe does not support free-threaded builds of Python, because its caches rely on the GIL; "
        "use the default build, such as python3.14 in place of python3.14t"
    )

# Public name -> module that defines it.
_HOMES = {
    "LLM": "logprobe.llm",
    "AsyncLLM": "logprobe.llm",
    "RemoteLLM": "logprobe.integrations.remote.llm",
    "SamplingParams": "logprobe.sampling",
    "EngineConfig": "logprobe.config",
    "CacheConfig": "logprobe.config",
    "SchedulerConfig": "logprobe.config",
    "ParallelConfig": "logprobe.config",
    "LoadConfig": "logprobe.config",
    "RequestOutput": "logprobe.engine.request",
    "CompletionOutput": "logprobe.engine.request",
    "Logprob": "logprobe.records",
    "FlatLogprobs": "logprobe.records",
    "Score": "logprobe.analysis",
    "LogprobeError": "logprobe.errors",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the keys are strings


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
