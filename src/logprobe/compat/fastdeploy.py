"""FastDeploy's offline interface and its documented logits processors.

Differences from FastDeploy:

- `engine_worker_queue_port`, `cache_queue_port`, `--enable-logprob`: no effect; `--metrics-port` serves
  metrics on loopback, without a key
- `LogitsProcessor`: from `logprobe.compat.fastdeploy`; a base class is optional. `__init__(fd_config)` gets
  an `EngineConfig` with `dtype` and `device`, without FastDeploy's nested fields
- `logits_processors_args`: a key that no processor takes is rejected
- `share_inputs["stop_flags"]`: (slots, 1) bool, all False
- slot numbers: the slot of a request may change, so store state under `share_inputs["req_ids"]`
- `apply(logits)`: changes to a row are discarded if its request does not give the processor's arguments
- `ThinkingBudgetLogitsProcessor`: the markers are `think_start` and `think_end`; no line break is forced
  before the end of thinking
"""

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
    """`logprobe.LLM` with outputs on which the attributes of a single completion can be read directly."""

    def generate(self, *args: Any, **options: Any) -> list[RequestOutput]:
        """Call `logprobe.LLM.generate` with these arguments."""
        return [_with_attributes(output) for output in super().generate(*args, **options)]

    def chat(self, *args: Any, **options: Any) -> list[RequestOutput]:
        """Call `logprobe.LLM.chat` with these arguments."""
        return [_with_attributes(output) for output in super().chat(*args, **options)]

    def stream(self, *args: Any, **options: Any) -> Generator[RequestOutput]:
        """Call `logprobe.LLM.stream` with these arguments."""
        for output in super().stream(*args, **options):
            yield _with_attributes(output)


def _with_attributes(output: RequestOutput) -> RequestOutput:
    output.outputs = Completions(output.outputs)
    return output
