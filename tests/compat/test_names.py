"""All names of the source designs, also under the older paths of some of them."""

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
OLDER_PLACES = [
    ("logprobe", "vllm_logprobs", VLLM),
    ("logprobe", "logprobs_processor", CONTAINERS),
    ("logprobe", "fastdeploy", {"LLM", "SamplingParams"}),
    ("logprobe", "genlm", {"AsyncLM", "AsyncVirtualLM"}),
    ("logprobe.records", "vllm_logprobs", VLLM),
    ("logprobe.records", "logprobs_processor", CONTAINERS),
    ("logprobe.kernels", "logprobs_processor", KERNELS),
    ("logprobe.transport", "logprobs_processor", TRANSPORT),
]


@pytest.mark.parametrize("module", NAMES)
def test_a_module_has_every_name_of_its_source(module: str) -> None:
    found = importlib.import_module(f"logprobe.compat.{module}")
    assert set(found.__all__) == NAMES[module]
    for name in NAMES[module]:
        assert getattr(found, name) is not None


@pytest.mark.parametrize(("place", "module", "names"), OLDER_PLACES)
def test_names_are_the_same_in_their_older_places(place: str, module: str, names: set[str]) -> None:
    older, found = importlib.import_module(place), importlib.import_module(f"logprobe.compat.{module}")
    for name in names:
        assert getattr(older, name) is getattr(found, name)
