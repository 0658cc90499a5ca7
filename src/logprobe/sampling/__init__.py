"""From a row of logits to the chosen token, and what a request may ask of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names
from logprobe.sampling.params import SamplingParams

if TYPE_CHECKING:
    from logprobe.sampling.sampler import Sampler

__all__ = ["Sampler", "SamplingParams"]

__getattr__ = lazy_names(__name__, {"Sampler": ".sampler"})  # loads torch
