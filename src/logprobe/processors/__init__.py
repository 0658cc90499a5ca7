"""Logits processors: interface, built-ins, registry and pipeline.

Names are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names

if TYPE_CHECKING:
    from logprobe.processors.arguments import TokenId
    from logprobe.processors.batch import ArgsView, BatchRow, BatchState
    from logprobe.processors.builtin.capture import CaptureLogitsProcessor, GlobalLogprobsCapture
    from logprobe.processors.builtin.grammar import GrammarLogitsProcessor
    from logprobe.processors.builtin.masks import (
        AllowedTokensLogitsProcessor,
        BannedWordsLogitsProcessor,
        LogitBiasLogitsProcessor,
        MinTokensLogitsProcessor,
    )
    from logprobe.processors.builtin.penalties import PenaltiesLogitsProcessor
    from logprobe.processors.builtin.thinking import ThinkingBudgetLogitsProcessor
    from logprobe.processors.effects import ProcessorEffect
    from logprobe.processors.foreign import (
        adapt_callable,
        adapt_matcher,
        adapt_transformers,
        adapt_vllm,
    )
    from logprobe.processors.interface import LogitsProcessor, ModelFacts
    from logprobe.processors.pipeline import Pipeline
    from logprobe.processors.registry import available_processors, describe_processor, load_processor
    from logprobe.processors.styles import BatchUpdate, MoveDirectionality

__all__ = [
    "AllowedTokensLogitsProcessor",
    "ArgsView",
    "BannedWordsLogitsProcessor",
    "BatchRow",
    "BatchState",
    "BatchUpdate",
    "CaptureLogitsProcessor",
    "GlobalLogprobsCapture",
    "GrammarLogitsProcessor",
    "LogitBiasLogitsProcessor",
    "LogitsProcessor",
    "MinTokensLogitsProcessor",
    "ModelFacts",
    "MoveDirectionality",
    "PenaltiesLogitsProcessor",
    "Pipeline",
    "ProcessorEffect",
    "ThinkingBudgetLogitsProcessor",
    "TokenId",
    "adapt_callable",
    "adapt_matcher",
    "adapt_transformers",
    "adapt_vllm",
    "available_processors",
    "describe_processor",
    "load_processor",
]

_HOMES = {
    "AllowedTokensLogitsProcessor": ".builtin.masks",
    "ArgsView": ".batch",
    "BannedWordsLogitsProcessor": ".builtin.masks",
    "BatchRow": ".batch",
    "BatchState": ".batch",
    "BatchUpdate": ".styles",
    "CaptureLogitsProcessor": ".builtin.capture",
    "GlobalLogprobsCapture": ".builtin.capture",
    "GrammarLogitsProcessor": ".builtin.grammar",
    "LogitBiasLogitsProcessor": ".builtin.masks",
    "LogitsProcessor": ".interface",
    "MinTokensLogitsProcessor": ".builtin.masks",
    "ModelFacts": ".interface",
    "MoveDirectionality": ".styles",
    "PenaltiesLogitsProcessor": ".builtin.penalties",
    "Pipeline": ".pipeline",
    "ProcessorEffect": ".effects",
    "ThinkingBudgetLogitsProcessor": ".builtin.thinking",
    "TokenId": ".arguments",
    "adapt_callable": ".foreign",
    "adapt_matcher": ".foreign",
    "adapt_transformers": ".foreign",
    "adapt_vllm": ".foreign",
    "available_processors": ".registry",
    "describe_processor": ".registry",
    "load_processor": ".registry",
}

__getattr__ = lazy_names(__name__, _HOMES)
