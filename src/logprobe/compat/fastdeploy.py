"""FastDeploy's offline interface and its documented logits processors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logprobe import llm
from logprobe.engine.request import CompletionOutput
from logprobe.processors import LogitBiasLogitsProcessor, LogitsProcessor, ThinkingBudgetLogitsProcessor
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Generator

    from logprobe.engine.request import RequestOutput

__all__ = [
    "LLM",
    "LogitBiasLogitsProcessor",
    "LogitsProcessor",
    "SamplingParams",
    "ThinkingBudgetLogitsProcessor",
]


class Completions(list[CompletionOutput]):
    """List of the completions of one prompt.

    If there is exactly one, its attributes can be read from the list: `output.outputs.text` is
    `output.outputs[0].text`. Otherwise this raises `AttributeError`.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in CompletionOutput.__dataclass_fields__:
            raise AttributeError(f"completions have no attribute {name!r}")
        if len(self) != 1:
            raise AttributeError(
                f"there are {len(self)} completions; take one by its index: outputs[0].{name}"
            )
        return getattr(self[0], name)


class LLM(llm.LLM):
    """`logprobe.LLM` whose outputs have the attributes of a single completion: `output.outputs.text`."""

    def generate(self, *args: Any, **options: Any) -> list[RequestOutput]:
        """Call `logprobe.LLM.generate`, which has the parameters."""
        return [_with_attributes(output) for output in super().generate(*args, **options)]

    def chat(self, *args: Any, **options: Any) -> list[RequestOutput]:
        """Call `logprobe.LLM.chat`, which has the parameters."""
        return [_with_attributes(output) for output in super().chat(*args, **options)]

    def stream(self, *args: Any, **options: Any) -> Generator[RequestOutput]:
        """Call `logprobe.LLM.stream`, which has the parameters."""
        for output in super().stream(*args, **options):
            yield _with_attributes(output)


def _with_attributes(output: RequestOutput) -> RequestOutput:
    output.outputs = Completions(output.outputs)
    return output
