"""Logits → top-k, log-normaliser, ranks, entropy and given ids; each name loads when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logprobe.kernels.extraction.api import batch_logprobs_to_host, extract, extract_top_k_logprobs
    from logprobe.kernels.extraction.head import head_extract
    from logprobe.kernels.info import kernel_info, warm_up

__all__ = [
    "batch_logprobs_to_host",
    "extract",
    "extract_top_k_logprobs",
    "head_extract",
    "kernel_info",
    "warm_up",
]

_MODULES = {
    "batch_logprobs_to_host": "extraction.api",
    "extract": "extraction.api",
    "extract_top_k_logprobs": "extraction.api",
    "head_extract": "extraction.head",
    "kernel_info": "info",
    "warm_up": "info",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
