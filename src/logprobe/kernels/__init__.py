"""Logits → top-k, log-normaliser, ranks, entropy and given ids; each name loads when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logprobe.kernels.extract import extract
    from logprobe.kernels.head import head_extract

__all__ = ["extract", "head_extract"]

_MODULES = {"extract": "extract", "head_extract": "head"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
