"""Log-probability records: per-step arrays, per-request containers, and byte, Arrow and JSON formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names
from logprobe.records.cut import cut_to_mass
from logprobe.records.flat import FlatLogprobs
from logprobe.records.forms.json import ChatEncoder
from logprobe.records.info import LogprobsInfo
from logprobe.records.padded import PaddedLogprobs, to_padded
from logprobe.records.rows import DeviceRows, GivenLists, GivenLogprobs, HostRows
from logprobe.records.values import Logprob, LogprobsOnePosition, TokenTable

if TYPE_CHECKING:
    from logprobe.compat.logprobs_processor import (
        LogprobsLists,
        LogprobsTensors,
        ModelRunnerOutput,
        SamplerOutput,
        TokenLogprob,
        TopLogprobs,
    )
    from logprobe.compat.vllm_logprobs import (
        PromptLogprobs,
        SampleLogprobs,
        append_logprobs_for_next_position,
        create_prompt_logprobs,
        create_sample_logprobs,
    )
    from logprobe.records.parquet import (
        ParquetWriter,
        from_arrow,
        iter_parquet,
        read_parquet,
        to_arrow,
        write_parquet,
    )

# Names imported on first use, because they need pyarrow or belong to `logprobe.compat` -> their module.
_HOMES = {
    "LogprobsLists": "logprobe.compat.logprobs_processor",
    "LogprobsTensors": "logprobe.compat.logprobs_processor",
    "ModelRunnerOutput": "logprobe.compat.logprobs_processor",
    "ParquetWriter": "logprobe.records.parquet",
    "PromptLogprobs": "logprobe.compat.vllm_logprobs",
    "SampleLogprobs": "logprobe.compat.vllm_logprobs",
    "SamplerOutput": "logprobe.compat.logprobs_processor",
    "TokenLogprob": "logprobe.compat.logprobs_processor",
    "TopLogprobs": "logprobe.compat.logprobs_processor",
    "append_logprobs_for_next_position": "logprobe.compat.vllm_logprobs",
    "create_prompt_logprobs": "logprobe.compat.vllm_logprobs",
    "create_sample_logprobs": "logprobe.compat.vllm_logprobs",
    "from_arrow": "logprobe.records.parquet",
    "iter_parquet": "logprobe.records.parquet",
    "read_parquet": "logprobe.records.parquet",
    "to_arrow": "logprobe.records.parquet",
    "write_parquet": "logprobe.records.parquet",
}

__all__ = [
    "ChatEncoder",
    "DeviceRows",
    "FlatLogprobs",
    "GivenLists",
    "GivenLogprobs",
    "HostRows",
    "Logprob",
    "LogprobsInfo",
    "LogprobsLists",
    "LogprobsOnePosition",
    "LogprobsTensors",
    "ModelRunnerOutput",
    "PaddedLogprobs",
    "ParquetWriter",
    "PromptLogprobs",
    "SampleLogprobs",
    "SamplerOutput",
    "TokenLogprob",
    "TokenTable",
    "TopLogprobs",
    "append_logprobs_for_next_position",
    "create_prompt_logprobs",
    "create_sample_logprobs",
    "cut_to_mass",
    "from_arrow",
    "iter_parquet",
    "read_parquet",
    "to_arrow",
    "to_padded",
    "write_parquet",
]


__getattr__ = lazy_names(__name__, _HOMES)
