"""Logits → logits, a request at a time: the interface, the built-ins, the registry and the pipeline.

Before it: the model's own logits. After it: the draw. Each name loads when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logprobe.processors.adapters import (
        adapt_callable,
        adapt_matcher,
        adapt_transformers,
        adapt_vllm,
    )
    from logprobe.processors.args import TokenId
    from logprobe.processors.batch import ArgsView, BatchRow, BatchState
    from logprobe.processors.capture import CaptureLogitsProcessor, GlobalLogprobsCapture
    from logprobe.processors.effects import ProcessorEffect
    from logprobe.processors.grammar import GrammarLogitsProcessor
    from logprobe.processors.interface import LogitsProcessor, ModelFacts
    from logprobe.processors.logit_bias import LogitBiasLogitsProcessor
    from logprobe.processors.masks import (
        AllowedTokensLogitsProcessor,
        BannedWordsLogitsProcessor,
        MinTokensLogitsProcessor,
    )
    from logprobe.processors.penalties import PenaltiesLogitsProcessor
    from logprobe.processors.pipeline import Pipeline
    from logprobe.processors.registry import available_processors, describe_processor, load_processor
    from logprobe.processors.thinking import ThinkingBudgetLogitsProcessor

__all__ = [
    "AllowedTokensLogitsProcessor",
    "ArgsView",
    "BannedWordsLogitsProcessor",
    "BatchRow",
    "BatchState",
    "CaptureLogitsProcessor",
    "GlobalLogprobsCapture",
    "GrammarLogitsProcessor",
    "LogitBiasLogitsProcessor",
    "LogitsProcessor",
    "MinTokensLogitsProcessor",
    "ModelFacts",
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

_MODULES = {
    "AllowedTokensLogitsProcessor": "masks",
    "ArgsView": "batch",
    "BannedWordsLogitsProcessor": "masks",
    "BatchRow": "batch",
    "BatchState": "batch",
    "CaptureLogitsProcessor": "capture",
    "GlobalLogprobsCapture": "capture",
    "GrammarLogitsProcessor": "grammar",
    "LogitBiasLogitsProcessor": "logit_bias",
    "LogitsProcessor": "interface",
    "MinTokensLogitsProcessor": "masks",
    "ModelFacts": "interface",
    "PenaltiesLogitsProcessor": "penalties",
    "Pipeline": "pipeline",
    "ProcessorEffect": "effects",
    "ThinkingBudgetLogitsProcessor": "thinking",
    "TokenId": "args",
    "adapt_callable": "adapters",
    "adapt_matcher": "adapters",
    "adapt_transformers": "adapters",
    "adapt_vllm": "adapters",
    "available_processors": "registry",
    "describe_processor": "registry",
    "load_processor": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
