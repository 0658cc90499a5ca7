"""Exact token log-probabilities from open-weights language models.

The way of the data is the order of the folders: `cli` → `llm` → `engine` → `models`, `sampling` →
`kernels` → `records`. The names below load when first used, so that `import logprobe` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logprobe.records import LogprobsTensors as LogprobsTensors

__version__ = "0.1.0"

# Public name -> the module that holds it.
_HOMES = {
    "LogprobsTensors": "logprobe.records",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'logprobe' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
