"""All names of the source designs."""

from __future__ import annotations

import importlib

import pytest

VLLM = {
    "FlatLogprobs",
    "Logprob",
    "LogprobsOnePosition",
    "PromptLogprobs",
    "SampleLogprobs",
    "append_logprobs_for_next_position",
    "create_prompt_logprobs",
    "create_sample_logprobs",
}
CONTAINERS = {
    "LogprobsLists",
    "LogprobsTensors",
    "ModelRunnerOutput",
    "SamplerOutput",
    "TokenLogprob",
    "TopLogprobs",
}
KERNELS = {"batch_logprobs_to_cpu_rust", "extract_top_k_logprobs_rust"}
TRANSPORT = {"AsyncCPUTransfer", "StreamingLogprobsCollector"}
NAMES = {
    "vllm_logprobs": VLLM,
    "logprobs_processor": CONTAINERS | KERNELS | TRANSPORT,
    "fastdeploy": {
        "LLM",
        "LogitBiasLogitsProcessor",
        "LogitsProcessor",
        "SamplingParams",
        "ThinkingBudgetLogitsProcessor",
    },
    "genlm": {"AsyncLM", "AsyncVirtualLM", "GlobalLogprobsCapture", "Token"},
}


@pytest.mark.parametrize("module", NAMES)
def test_a_module_has_every_name_of_its_source(module: str) -> None:
    found = importlib.import_module(f"logprobe.compat.{module}")
    assert set(found.__all__) == NAMES[module]
    for name in NAMES[module]:
        assert getattr(found, name) is not None
