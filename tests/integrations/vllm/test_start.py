"""Errors at startup: missing packages, options that vLLM refuses, and conflicting options."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, SamplingParams
from logprobe.config import EngineConfig
from logprobe.engine.backends.start import start_engine
from logprobe.errors import ModelError, ParameterError, UnknownParameterError
from logprobe.integrations.vllm.orders import FORMAT
from logprobe.integrations.vllm.start import CPU_BLOCK_SIZE, engine_args
from logprobe.models import resolve
from refusals import raises

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = {"enforce_eager": True}


def test_without_vllm_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModelError, match=r"pip install 'logprobe\[vllm\]'"):
        start_engine(EngineConfig(model=str(tiny_model_folder), engine="vllm"))


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "checkpoint"},
        {"arithmetic": "fma"},
        {"kv_cache_dtype": "bfloat16"},
        {"async_scheduling": True},
        {"speculate": True},
        {"process": True},
        {"data_parallel_size": 2},
    ],
)
def test_settings_of_the_native_engine_are_refused_by_name(
    tiny_model_folder: Path, settings: dict[str, Any]
) -> None:
    [name] = settings
    with raises(ParameterError, parameter=name):
        start_engine(EngineConfig(model=str(tiny_model_folder), engine="vllm", **settings))


def test_options_are_a_dict_or_json_and_of_vllm_alone() -> None:
    text = '{"tensor_parallel_size": 2}'
    assert EngineConfig(engine="vllm", engine_options=text).engine_options == {"tensor_parallel_size": 2}
    for wrong in ("{", "[1]", {1: 2}):
        with raises(ParameterError, parameter="engine_options"):
            EngineConfig(engine="vllm", engine_options=wrong)
    with pytest.raises(ParameterError, match="engine='vllm'"):
        EngineConfig(engine_options={})
    with pytest.raises(ParameterError, match="native, vllm"):
        EngineConfig(engine="sglang")


@pytest.mark.vllm
class TestOptions:
    def test_an_unknown_one_is_refused_with_the_nearest(self, vllm_config: EngineConfig) -> None:
        with pytest.raises(UnknownParameterError, match="tensor_parallel_size"):
            start_engine(replace(vllm_config, engine_options={"tensor_paralel_size": 2}))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
            ("data_parallel_size", 2),
            ("logprobs_mode", "processed_logprobs"),
            ("logits_processors", ["a:B"]),
            ("model", "gpt2"),
        ],
    )
    def test_what_cannot_stand_beside_the_capture_is_refused_by_name(
        self, vllm_config: EngineConfig, name: str, value: Any
    ) -> None:
        with pytest.raises(ParameterError, match=name):
            start_engine(replace(vllm_config, engine_options={name: value}))

    def test_blocks_of_the_prefix_cache_are_small_on_a_cpu_unless_told(
        self, vllm_config: EngineConfig
    ) -> None:
        files = resolve(vllm_config.model)
        assert engine_args(vllm_config, files).block_size == CPU_BLOCK_SIZE
        given = replace(vllm_config, engine_options={"block_size": 64})
        assert engine_args(given, files).block_size == 64

    def test_what_vllm_refuses_is_told_in_its_words(self, vllm_config: EngineConfig) -> None:
        with pytest.raises((ParameterError, ModelError), match="max_model_len"):
            start_engine(replace(vllm_config, max_model_len=100_000))
        with pytest.raises(ParameterError, match="the device of this vLLM"):
            start_engine(replace(vllm_config, device="cuda"))

    @pytest.mark.real_model
    def test_weights_of_a_gguf_file_are_read_where_they_lie(self) -> None:
        params = SamplingParams(max_tokens=4, temperature=0, logprobs=0)
        logprobs = []
        for engine in ("native", "vllm"):
            options = OPTIONS if engine == "vllm" else None
            with LLM("smollm2", engine=engine, kv_cache_memory_bytes=1 << 29, engine_options=options) as llm:
                [output] = llm.generate("The capital of France is", params)
            logprobs.append(output.outputs[0].logprobs.chosen_entries().logprobs)
        np.testing.assert_allclose(*logprobs, atol=1e-3)
        assert engine_args(EngineConfig(engine="vllm"), resolve("smollm2")).load_format == FORMAT
