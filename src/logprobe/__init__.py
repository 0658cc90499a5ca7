"""Exact token log-probabilities from open-weights language models.

The way of the data is the order of the folders: `cli` → `llm`, `async_lm` → `engine` → `models`, `sampling` →
`kernels` → `records`. The names below load when first used, so that `import logprobe` stays quick.
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
        LogprobsLists as LogprobsLists,
    )
    from logprobe.records import (
        LogprobsOnePosition as LogprobsOnePosition,
    )
    from logprobe.records import (
        LogprobsTensors as LogprobsTensors,
    )
    from logprobe.records import (
        ModelRunnerOutput as ModelRunnerOutput,
    )
    from logprobe.records import (
        PromptLogprobs as PromptLogprobs,
    )
    from logprobe.records import (
        SampleLogprobs as SampleLogprobs,
    )
    from logprobe.records import (
        SamplerOutput as SamplerOutput,
    )
    from logprobe.records import (
        TokenLogprob as TokenLogprob,
    )
    from logprobe.records import (
        TopLogprobs as TopLogprobs,
    )
    from logprobe.records import (
        append_logprobs_for_next_position as append_logprobs_for_next_position,
    )
    from logprobe.records import (
        create_prompt_logprobs as create_prompt_logprobs,
    )
    from logprobe.records import (
        create_sample_logprobs as create_sample_logprobs,
    )
    from logprobe.sampling import (
        SamplingParams as SamplingParams,
    )

# Public name -> the module that holds it.
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
    "PromptLogprobs": "logprobe.records",
    "SampleLogprobs": "logprobe.records",
    "create_prompt_logprobs": "logprobe.records",
    "create_sample_logprobs": "logprobe.records",
    "append_logprobs_for_next_position": "logprobe.records",
    "TokenLogprob": "logprobe.records",
    "TopLogprobs": "logprobe.records",
    "LogprobsTensors": "logprobe.records",
    "LogprobsLists": "logprobe.records",
    "SamplerOutput": "logprobe.records",
    "ModelRunnerOutput": "logprobe.records",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the keys are strings


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
