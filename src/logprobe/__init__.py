"""Exact token log-probabilities from open-weights language models.

Data flows through the folders in this order: `cli` → `llm`, `async_lm` → `engine` → `models`, `sampling` →
`kernels` → `records`. The names below are imported on first use, so that `import logprobe` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names
from logprobe._version import __version__

if TYPE_CHECKING:
    from logprobe.analysis import (
        Score as Score,
    )
    from logprobe.async_lm import (
        AsyncLM as AsyncLM,
    )
    from logprobe.compat.logprobs_processor import (
        LogprobsLists as LogprobsLists,
    )
    from logprobe.compat.logprobs_processor import (
        LogprobsTensors as LogprobsTensors,
    )
    from logprobe.compat.logprobs_processor import (
        ModelRunnerOutput as ModelRunnerOutput,
    )
    from logprobe.compat.logprobs_processor import (
        SamplerOutput as SamplerOutput,
    )
    from logprobe.compat.logprobs_processor import (
        TokenLogprob as TokenLogprob,
    )
    from logprobe.compat.logprobs_processor import (
        TopLogprobs as TopLogprobs,
    )
    from logprobe.compat.vllm_logprobs import (
        PromptLogprobs as PromptLogprobs,
    )
    from logprobe.compat.vllm_logprobs import (
        SampleLogprobs as SampleLogprobs,
    )
    from logprobe.compat.vllm_logprobs import (
        append_logprobs_for_next_position as append_logprobs_for_next_position,
    )
    from logprobe.compat.vllm_logprobs import (
        create_prompt_logprobs as create_prompt_logprobs,
    )
    from logprobe.compat.vllm_logprobs import (
        create_sample_logprobs as create_sample_logprobs,
    )
    from logprobe.config import (
        EngineConfig as EngineConfig,
    )
    from logprobe.engine.request import (
        CompletionOutput as CompletionOutput,
    )
    from logprobe.engine.request import (
        RequestOutput as RequestOutput,
    )
    from logprobe.errors import (
        LogprobeError as LogprobeError,
    )
    from logprobe.integrations.remote.lm import (
        RemoteLM as RemoteLM,
    )
    from logprobe.integrations.vllm.virtual_lm import (
        AsyncVirtualLM as AsyncVirtualLM,
    )
    from logprobe.llm import (
        LLM as LLM,
    )
    from logprobe.records import (
        FlatLogprobs as FlatLogprobs,
    )
    from logprobe.records import (
        Logprob as Logprob,
    )
    from logprobe.records import (
        LogprobsOnePosition as LogprobsOnePosition,
    )
    from logprobe.sampling import (
        SamplingParams as SamplingParams,
    )

# Public name -> module that defines it.
_HOMES = {
    "LLM": "logprobe.llm",
    "AsyncLM": "logprobe.async_lm",
    "RemoteLM": "logprobe.integrations.remote.lm",
    "AsyncVirtualLM": "logprobe.integrations.vllm.virtual_lm",
    "EngineConfig": "logprobe.config",
    "LogprobeError": "logprobe.errors",
    "SamplingParams": "logprobe.sampling",
    "RequestOutput": "logprobe.engine.request",
    "CompletionOutput": "logprobe.engine.request",
    "Score": "logprobe.analysis",
    "FlatLogprobs": "logprobe.records",
    "Logprob": "logprobe.records",
    "LogprobsOnePosition": "logprobe.records",
    "PromptLogprobs": "logprobe.compat.vllm_logprobs",
    "SampleLogprobs": "logprobe.compat.vllm_logprobs",
    "create_prompt_logprobs": "logprobe.compat.vllm_logprobs",
    "create_sample_logprobs": "logprobe.compat.vllm_logprobs",
    "append_logprobs_for_next_position": "logprobe.compat.vllm_logprobs",
    "TokenLogprob": "logprobe.compat.logprobs_processor",
    "TopLogprobs": "logprobe.compat.logprobs_processor",
    "LogprobsTensors": "logprobe.compat.logprobs_processor",
    "LogprobsLists": "logprobe.compat.logprobs_processor",
    "SamplerOutput": "logprobe.compat.logprobs_processor",
    "ModelRunnerOutput": "logprobe.compat.logprobs_processor",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the keys are strings


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
