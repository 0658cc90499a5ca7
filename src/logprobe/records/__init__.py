"""What travels: per-step arrays, per-request containers, their byte layout and their Arrow form."""

from logprobe.records.flat import FlatLogprobs
from logprobe.records.info import LogprobsInfo
from logprobe.records.outputs import ModelRunnerOutput, SamplerOutput
from logprobe.records.requests import (
    PromptLogprobs,
    SampleLogprobs,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)
from logprobe.records.step_lists import LogprobsLists
from logprobe.records.steps import GivenLogprobs, LogprobsTensors
from logprobe.records.values import Logprob, LogprobsOnePosition, TokenLogprob, TokenTable, TopLogprobs

__all__ = [
    "FlatLogprobs",
    "GivenLogprobs",
    "Logprob",
    "LogprobsInfo",
    "LogprobsLists",
    "LogprobsOnePosition",
    "LogprobsTensors",
    "ModelRunnerOutput",
    "PromptLogprobs",
    "SampleLogprobs",
    "SamplerOutput",
    "TokenLogprob",
    "TokenTable",
    "TopLogprobs",
    "append_logprobs_for_next_position",
    "create_prompt_logprobs",
    "create_sample_logprobs",
]
