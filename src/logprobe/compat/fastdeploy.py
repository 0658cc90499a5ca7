"""FastDeploy's offline interface and its documented logits processors."""

from __future__ import annotations

from logprobe.llm import LLM
from logprobe.processors import LogitBiasLogitsProcessor, LogitsProcessor, ThinkingBudgetLogitsProcessor
from logprobe.sampling import SamplingParams

__all__ = [
    "LLM",
    "LogitBiasLogitsProcessor",
    "LogitsProcessor",
    "SamplingParams",
    "ThinkingBudgetLogitsProcessor",
]
