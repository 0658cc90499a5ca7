"""Keyword arguments of other libraries: ignored and logged once, or refused with this library's name."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import torch

from logprobe import LLM, SamplingParams
from logprobe.config import EngineConfig, _warn_ignored
from logprobe.errors import ParameterError, UnknownParameterError
from logprobe.ignored_kwargs import CLASSES as TABLE
from logprobe.ignored_kwargs import (
    FIELDS_WITHOUT_EFFECT,
    FOREIGN_FIELDS,
    NEUTRAL_FIELDS,
    SWITCH,
    Keyword,
    names_here,
)

if TYPE_CHECKING:
    from pathlib import Path

CLASSES: dict[str, Any] = {"EngineConfig": EngineConfig, "SamplingParams": SamplingParams}
IGNORED = [(of, name) for of, table in TABLE.items() for name, keyword in table.items() if not keyword.use]


@pytest.fixture(autouse=True)
def nothing_logged() -> None:
    """Forget which keywords have been logged."""
    _warn_ignored.cache_clear()


@pytest.mark.parametrize(("of", "name"), IGNORED)
def test_a_keyword_that_changes_nothing_is_ignored_and_logged_once_unless_it_says_what_is_so(
    of: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    keyword = TABLE[of][name]
    for value in keyword.accepted or (8182, 0.4, "x"):
        assert CLASSES[of](**{name: value}) == CLASSES[of]()
    is_logged = keyword.accepted in (None, SWITCH)
    assert caplog.messages == [f"{name} has no effect in logprobe: {keyword.reason}"] * is_logged


@pytest.mark.parametrize(("of", "name"), [(of, name) for of, name in IGNORED if TABLE[of][name].accepted])
def test_any_other_value_is_refused_with_the_reason(
    of: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ParameterError, match="^" + name + ": must be ") as caught:
        CLASSES[of](**{name: "zzz"})
    assert str(caught.value).endswith(f", got 'zzz': {TABLE[of][name].reason}")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("of", "given", "own"),
    [
        ("EngineConfig", {"num_gpu_blocks_override": 16}, "kv_cache_memory_bytes"),
        ("EngineConfig", {"kv_cache_dtype": "fp8"}, "bfloat16"),
        ("EngineConfig", {"speculative_config": {}}, "speculate"),
        ("EngineConfig", {"tensor_parallel_size": 2}, "engine='vllm'"),
        ("EngineConfig", {"trust_remote_code": True}, "never run"),
        ("EngineConfig", {"revision": "v2"}, "pass its folder as the model"),
        ("EngineConfig", {"max_num_seq": 16}, "max_num_seqs"),
        ("SamplingParams", {"skip_special_tokens": False}, "token_ids"),
        ("SamplingParams", {"thinking_token_budget": 5}, "logits_processors_args"),
        ("SamplingParams", {"guided_decoding": {}}, "response_format"),
        ("SamplingParams", {"guided_json": {}}, "response_format"),
        ("SamplingParams", {"repeat_penalty": 1}, "repetition_penalty"),
        ("SamplingParams", {"detokenise": False}, "known: "),
    ],
)
def test_what_would_change_something_is_refused_with_our_word(
    of: str, given: dict[str, Any], own: str
) -> None:
    with pytest.raises(ParameterError, match=own) as caught:
        CLASSES[of](**given)
    assert caught.value.parameter == next(iter(given))


def test_another_engine_has_words_of_its_own() -> None:
    with pytest.raises(ParameterError, match=r"engine_options={'gpu_memory_utilization': \.\.\.}"):
        EngineConfig(engine="vllm", gpu_memory_utilization=0.4)  # type: ignore[call-arg]
    with pytest.raises(UnknownParameterError, match="did you mean 'kv_cache_memory_bytes'"):
        EngineConfig(engine="vllm", num_gpu_blocks_override=8)  # type: ignore[call-arg]


def test_no_keyword_has_two_meanings() -> None:
    for of, table in TABLE.items():
        own = {field.name for field in fields(CLASSES[of])}
        assert not table.keys() & own
        assert not [name for name, keyword in table.items() if not keyword.use and names_here(name)]
    assert not FIELDS_WITHOUT_EFFECT.keys() & NEUTRAL_FIELDS.keys()
    assert not FOREIGN_FIELDS.keys() & (FIELDS_WITHOUT_EFFECT.keys() | NEUTRAL_FIELDS.keys())


def test_a_keyword_accepts_its_values_alone() -> None:
    assert [Keyword(accepted=(0, "")).accepts(value) for value in (0, False, "", 1, None)] == [
        *(True, True, True),
        *(False, False),
    ]
    assert Keyword(accepted=None).accepts([1])
    assert not Keyword().accepts("")


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16"), (torch.half, "float16")],
)
def test_a_dtype_goes_by_torchs_own_names(given: Any, dtype: str) -> None:
    assert EngineConfig(dtype=given).dtype == dtype


def test_a_model_by_name_may_name_its_own_tokenizer(tiny_model_folder: Path, tiny_llm: LLM) -> None:
    folder = str(tiny_model_folder)
    with LLM(
        tiny_model_folder, tokenizer=folder, kv_cache_memory_bytes=1 << 20, tensor_parallel_size=1
    ) as llm:
        assert llm.tokenizer.encode("the cat") == tiny_llm.tokenizer.encode("the cat")
    with pytest.raises(ParameterError, match="must be None unless"):
        LLM(folder, tokenizer="another")


def test_no_call_asks_for_more_alternatives_than_the_cap(
    tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    few, many = SamplingParams(max_tokens=1, logprobs=1), SamplingParams(max_tokens=1, logprobs=2)
    with LLM(tiny_model_folder, kv_cache_memory_bytes=1 << 20, max_logprobs=1) as llm:
        name, folder = next(iter(adapter_folders.items()))
        llm.add_lora(name, folder)
        for one in (llm, llm.with_lora(name)):
            assert one.generate("the cat", few)[0].outputs[0].logprobs is not None
            for asked in (many, [many], SamplingParams(prompt_logprobs=2), SamplingParams(logprobs=-1)):
                with pytest.raises(ParameterError, match=r"must be between 0 and 1 \(max_logprobs\)"):
                    one.generate(["the cat"], asked)
            with pytest.raises(ParameterError, match="max_logprobs"):
                next(one.stream("the cat", many))
            with pytest.raises(ParameterError, match="max_logprobs"):
                one.score([("the", " cat")], logprobs=2)
            assert one.score([("the", " cat")], logprobs=1)[0].record is not None
    with pytest.raises(ParameterError, match="max_logprobs: must be >= -1"):
        LLM(tiny_model_folder, max_logprobs=-2)
