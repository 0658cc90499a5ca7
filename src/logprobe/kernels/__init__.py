"""Kernels that compute log-probabilities, ranks, top-k and other columns from logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names

if TYPE_CHECKING:
    from logprobe.kernels.extraction.api import extract
    from logprobe.kernels.extraction.head import head_extract
    from logprobe.kernels.extraction.rows import (
        batch_logprobs_to_host,
        extract_top_k_logprobs,
    )
    from logprobe.kernels.info import kernel_info

__all__ = [
    "batch_logprobs_to_host",
    "extract",
    "extract_top_k_logprobs",
    "head_extract",
    "kernel_info",
]

_HOMES = {
    "batch_logprobs_to_host": ".extraction.rows",
    "extract": ".extraction.api",
    "extract_top_k_logprobs": ".extraction.rows",
    "head_extract": ".extraction.head",
    "kernel_info": ".info",
}

__getattr__ = lazy_names(__name__, _HOMES)
