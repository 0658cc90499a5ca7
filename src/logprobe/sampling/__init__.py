"""From a row of logits to the chosen token, and what a request may ask of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logprobe.sampling.params import SamplingParams

if TYPE_CHECKING:
    from logprobe.sampling.sampler import Sampler

__all__ = ["Sampler", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name != "Sampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from logprobe.sampling.sampler import Sampler  # loads torch

    return Sampler
