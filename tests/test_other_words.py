"""Keywords of other programs: what changes nothing is taken and told once, all else refused with our word."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import torch

from logprobe import LLM, SamplingParams, other_words
from logprobe.config import EngineConfig
from logprobe.errors import OTHER_NAMES, ParameterError, UnknownParameterError
from logprobe.other_words import OTHER_WORDS, SWITCH

if TYPE_CHECKING:
    from pathlib import Path

CLASSES: dict[str, Any] = {"EngineConfig": EngineConfig, "SamplingParams": SamplingParams}
WORDS = [(of, name) for of, words in OTHER_WORDS.items() for name in words]


@pytest.fixture(autouse=True)
def untold() -> None:
    """No word has been told yet."""
    other_words._tell.cache_clear()


@pytest.mark.parametrize(("of", "name"), WORDS)
def test_a_word_that_changes_nothing_is_taken_and_told_once_unless_it_says_what_is_so(
    of: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    word = OTHER_WORDS[of][name]
    for value in word.values or (8182, 0.4, "x"):
        assert CLASSES[of](**{name: value}) == CLASSES[of]()
    is_told = word.values in (None, SWITCH)
    assert caplog.messages == [f"{name} changes nothing here: {word.why}"] * is_told


@pytest.mark.parametrize(("of", "name"), [(of, name) for of, name in WORDS if OTHER_WORDS[of][name].values])
def test_any_other_value_is_refused_with_the_reason(
    of: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    word = OTHER_WORDS[of][name]
    with pytest.raises(ParameterError, match="^" + name + ": must be ") as caught:
        CLASSES[of](**{name: "zzz"})
    assert str(caught.value).endswith(f", got 'zzz': {word.why}")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("of", "given", "own"),
    [
        ("EngineConfig", {"max_num_seqs": 16}, "max_batch_rows"),
        ("EngineConfig", {"max_num_batched_tokens": 16}, "max_batch_tokens"),
        ("EngineConfig", {"kv_cache_memory_bytes": 1 << 20}, "kv_bytes"),
        ("EngineConfig", {"data_parallel_size": 2}, "data_parallel"),
        ("EngineConfig", {"async_scheduling": True}, "overlap"),
        ("EngineConfig", {"speculative_config": {}}, "speculate"),
        ("EngineConfig", {"tensor_parallel_size": 2}, "engine='vllm'"),
        ("EngineConfig", {"trust_remote_code": True}, "never run"),
        ("EngineConfig", {"revision": "v2"}, "name that as the model"),
        ("EngineConfig", {"max_batch_row": 16}, "max_batch_rows"),
        ("SamplingParams", {"skip_special_tokens": False}, "token_ids"),
        ("SamplingParams", {"thinking_token_budget": 5}, "logits_processors_args"),
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
    with pytest.raises(UnknownParameterError, match="did you mean 'max_batch_rows'"):
        EngineConfig(engine="vllm", max_num_seqs=8)  # type: ignore[call-arg]


def test_no_word_has_two_meanings() -> None:
    for of, words in OTHER_WORDS.items():
        own = {field.name for field in fields(CLASSES[of])}
        assert not words.keys() & own
        assert not words.keys() & OTHER_NAMES.keys()
        assert not own & OTHER_NAMES.keys()


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16"), (torch.half, "float16")],
)
def test_a_dtype_goes_by_torchs_own_names(given: Any, dtype: str) -> None:
    assert EngineConfig(dtype=given).dtype == dtype


def test_a_model_by_name_may_name_its_own_tokenizer(tiny_model_folder: Path, tiny_llm: LLM) -> None:
    folder = str(tiny_model_folder)
    with LLM(tiny_model_folder, tokenizer=folder, kv_bytes=1 << 20, tensor_parallel_size=1) as llm:
        assert llm.get_tokenizer().encode("the cat") == tiny_llm.get_tokenizer().encode("the cat")
    with pytest.raises(ParameterError, match="brings its own"):
        LLM(folder, tokenizer="another")


def test_no_call_asks_for_more_alternatives_than_the_cap(
    tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    few, many = SamplingParams(max_tokens=1, logprobs=1), SamplingParams(max_tokens=1, logprobs=2)
    with LLM(tiny_model_folder, kv_bytes=1 << 20, max_logprobs=1) as llm:
        name, folder = next(iter(adapter_folders.items()))
        llm.add_lora(name, folder)
        for one in (llm, llm.with_lora(name)):
            assert one.generate("the cat", few)[0].outputs.logprobs is not None
            for asked in (many, [many], SamplingParams(prompt_logprobs=2), SamplingParams(logprobs=-1)):
                with pytest.raises(ParameterError, match=r"must lie in 0\.\.1 \(max_logprobs\)"):
                    one.generate(["the cat"], asked)
            with pytest.raises(ParameterError, match="max_logprobs"):
                next(one.stream("the cat", many))
            with pytest.raises(ParameterError, match="max_logprobs"):
                one.score([("the", " cat")], logprobs=2)
            assert one.score([("the", " cat")], logprobs=1)[0].record is not None
    with pytest.raises(ParameterError, match="max_logprobs: must be -1"):
        LLM(tiny_model_folder, max_logprobs=-2)
