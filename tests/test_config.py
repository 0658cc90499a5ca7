"""Settings are frozen and validated at construction; for a misspelt name the nearest one is suggested."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import pytest

from logprobe.config import (
    CacheConfig,
    EngineConfig,
    EngineSettings,
    LoadConfig,
    ParallelConfig,
    SchedulerConfig,
    strict_keywords,
)
from logprobe.errors import ParameterError, UnknownParameterError, require

GROUPS: dict[str, type] = {
    "cache_config": CacheConfig,
    "scheduler_config": SchedulerConfig,
    "parallel_config": ParallelConfig,
    "load_config": LoadConfig,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "gpu"), ("device", None), ("device", "mps"), ("device", "cuda:x"),
        ("dtype", "float64"), ("dtype", "fp16"),
        ("weights", "int8"),
        ("max_model_len", 0), ("max_model_len", -1), ("max_model_len", "long"), ("max_model_len", 1.5),
        ("kv_cache_memory_bytes", 0), ("kv_cache_memory_bytes", "1GiB"), ("kv_cache_memory_bytes", True),
        ("max_num_batched_tokens", 0), ("max_num_batched_tokens", None), ("max_num_batched_tokens", "many"),
        ("max_num_seqs", -3), ("max_num_seqs", 2.0),
        ("seed", "lucky"), ("seed", None), ("seed", 1.5),
        ("model", ""), ("model", None), ("model", 5),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        EngineConfig(**{name: value})
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_batch_token", "max_num_batched_tokens"),
        ("kv_cache_bytes", "kv_cache_memory_bytes"),
        ("modell", "model"),
    ],
)
def test_a_misspelt_setting_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownParameterError, match=f"did you mean '{nearest}'"):
        EngineConfig(**{name: 1})


def test_a_device_that_is_not_supported_is_answered_with_what_to_do() -> None:
    with pytest.raises(ParameterError, match=r"mps.*use cpu"):
        EngineConfig(device="mps")


def test_settings_are_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig("smollm2")  # type: ignore[misc]


def test_equal_settings_are_equal() -> None:
    assert EngineConfig(model="m", seed=3) == EngineConfig(seed=3, model="m")
    assert hash(EngineConfig(model="m")) == hash(EngineConfig(model="m"))


@pytest.mark.parametrize("config", [EngineConfig, *GROUPS.values()])
def test_every_setting_is_documented(config: type) -> None:
    assert all(f"{name}:" in (config.__doc__ or "") for name in config.__dataclass_fields__)


def test_a_keyword_sets_the_field_of_its_group() -> None:
    grouped = EngineConfig(scheduler_config=SchedulerConfig(max_num_seqs=8, speculate=True), seed=3)
    assert EngineConfig(max_num_seqs=8, speculate=True, seed=3) == grouped
    assert grouped.scheduler_config == SchedulerConfig(max_num_seqs=8, speculate=True)
    # A keyword replaces the field of a group that is given as well.
    few = EngineConfig(scheduler_config=SchedulerConfig(max_num_seqs=8, speculate=True), max_num_seqs=2)
    assert few.scheduler_config == SchedulerConfig(max_num_seqs=2, speculate=True)
    assert replace(grouped, max_num_seqs=2, seed=0) == few  # type: ignore[call-arg]
    assert copy.deepcopy(grouped) == grouped


def test_the_keywords_of_a_config_make_an_equal_one() -> None:
    config = EngineConfig(model="m", kv_cache_memory_bytes=5, process=True, arithmetic="bf16", seed=2)
    keywords = config.keywords()
    assert EngineConfig(**keywords) == config
    assert not keywords.keys() & GROUPS.keys()
    assert keywords.keys() | GROUPS.keys() == EngineSettings.__annotations__.keys() | {"model"}


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_has_its_own_type(name: str) -> None:
    with pytest.raises(ParameterError) as caught:
        EngineConfig(**{name: {}})
    assert caught.value.parameter == name
    with pytest.raises(UnknownParameterError, match="did you mean 'max_num_seqs'"):
        SchedulerConfig(max_num_seq=1)  # type: ignore[call-arg]


def test_strict_keywords_leaves_known_ones_alone() -> None:
    @strict_keywords
    @dataclass(kw_only=True)
    class Options:
        first: int = 1

    assert Options(first=2).first == 2
    with pytest.raises(UnknownParameterError, match="Options has no such parameter"):
        Options(fist=2)  # type: ignore[call-arg]


def test_require_names_the_parameter() -> None:
    require("anything", "size", "unused")
    with pytest.raises(ParameterError, match="size: is too large") as caught:
        require([], "size", "is too large")
    assert caught.value.parameter == "size"
