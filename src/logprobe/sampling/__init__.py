"""Sampling parameters of requests, and the sampler that turns logits into tokens and log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names
from logprobe.sampling.params import SamplingParams

if TYPE_CHECKING:
    from logprobe.sampling.sampler import Sampler

__all__ = ["Sampler", "SamplingParams"]

__getattr__ = lazy_names(__name__, {"Sampler": ".sampler"})  # loads the kernels
