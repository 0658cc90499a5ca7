"""`LLM`: invalid arguments, failures and close."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, SamplingParams
from logprobe.errors import (
    BatchError,
    EngineClosedError,
    ParameterError,
    PromptTooLongError,
    UnknownParameterError,
)
from logprobe.records.rows import KERNEL_EXTRAS
from logprobe.testing import failing_steps, holding_steps, open_requests, watching_steps

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.engine.protocol import StepBatch

LIMIT_S = 120  # generous, also for a busy machine


# -- invalid arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "parameter", "says"),
    [
        ([[]], "prompt", "is empty"),
        ([[5, -1]], "prompt", "outside"),
        ([[5, 99999]], "prompt", "outside the vocabulary"),
        ([[5, 2**32 + 5]], "prompt", "outside"),
        ([[5, 2**80]], "prompt", "list of token ids"),
        ([[5, [6]]], "prompt", "list of token ids"),
        ([[5, 6.5]], "prompt", "list of token ids"),
        ([[5, True], [True]], "prompt", "list of token ids"),
        ([None], "prompt", "list of token ids"),
        (5, "prompts", "must be a string"),
        (None, "prompts", "must be a string"),
        ("a\ud800b", "prompt", "not valid Unicode"),
    ],
)
def test_a_bad_prompt_is_refused_by_name(tiny_llm: LLM, prompts: Any, parameter: str, says: str) -> None:
    with pytest.raises(ParameterError, match=says) as caught:
        tiny_llm.generate(prompts)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params"),
        ({"sampling_params": [SamplingParams()] * 2}, "sampling_params"),
        ({"sampling_params": "greedy"}, "sampling_params"),
        ({"on_error": "ignore"}, "on_error"),
        ({"sampling_params": SamplingParams(logprobs=0, logprob_token_ids=[5, 286000])}, "logprob_token_ids"),
        ({"sampling_params": SamplingParams(stop_token_ids=[-1])}, "stop_token_ids"),
    ],
)
def test_a_bad_option_is_refused_by_name(tiny_llm: LLM, options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        tiny_llm.generate("the cat", **options)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("pair", "parameter"),
    [
        (("the", ""), "continuation"),
        (([5], []), "continuation"),
        (("the", [5]), "pairs"),
        (("the",), "pairs"),
        ("the", "pairs"),
        (([5], [999999]), "prompt"),
        (([5], [6] * 200), "prompt"),
    ],
)
def test_a_bad_pair_is_refused_by_name(tiny_llm: LLM, pair: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        tiny_llm.score([("the", " cat"), pair])
    assert caught.value.parameter == parameter


def test_one_bad_prompt_leaves_nothing_behind(tiny_llm: LLM) -> None:
    with pytest.raises(ParameterError):
        tiny_llm.generate([[5], [6], [999999]])
    assert open_requests(tiny_llm) == []
    assert not tiny_llm.engine.is_busy


def test_a_misspelt_setting_is_answered_with_the_nearest(tiny_model_folder: Path) -> None:
    with pytest.raises(UnknownParameterError, match="max_num_batched_tokens"):
        LLM(str(tiny_model_folder), max_batch_token=5)


# -- failures and close ------------------------------------------------------------------------------------


def boom_at_66(batch: StepBatch) -> None:
    if 66 in batch.token_ids:
        raise RuntimeError("boom")


def test_a_failed_request_is_raised_with_all_outputs_or_returned(tiny_llm: LLM) -> None:
    asked = SamplingParams(max_tokens=2, seed=1)
    tiny_llm.engine.forget_prefixes()  # otherwise no step would run
    with watching_steps(tiny_llm, boom_at_66):
        assert tiny_llm.generate([[6, 6, 6]], asked)[0].error is None
        with pytest.raises(BatchError, match="boom") as caught:
            tiny_llm.generate([[66, 6, 6]], asked)
        assert list(caught.value.errors) == [0]
        returned = tiny_llm.generate([[66, 6, 6]], asked, on_error="return")[0]
        assert "boom" in str(returned.error)
        assert tiny_llm.generate([[6, 6, 7]], asked)[0].error is None


def test_closing_twice_is_fine_and_asking_afterwards_is_an_error(tiny_model_folder: Path) -> None:
    llm = LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="closed"):
        llm.generate("the cat")
    with pytest.raises(EngineClosedError, match="closed"):
        llm.score([("the", " cat")])


def test_closing_ends_a_call_in_progress_on_another_thread(tiny_model_folder: Path) -> None:
    llm = LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20, max_num_seqs=1)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            llm.generate([[5]] * 50, SamplingParams(max_tokens=100, ignore_eos=True))
        except (BatchError, EngineClosedError) as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    closing = threading.Thread(target=llm.close)
    with holding_steps(llm) as hold:  # otherwise the call might end by itself first
        thread.start()
        hold.wait()
        closing.start()
        for one in (closing, thread):
            one.join(LIMIT_S)
            assert not one.is_alive(), "the call hangs"
    assert "closed" in str(caught[0])


# -- one invalid prompt among many -------------------------------------------------------------------------


def test_a_bad_prompt_among_many_is_named_by_its_number(tiny_llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"^prompt: number 2 of 3 has 500 tokens") as caught:
        tiny_llm.generate([[5], [6], [7] * 500])
    assert caught.value.parameter == "prompt"


def test_a_bad_prompt_among_many_does_not_refuse_the_others(tiny_llm: LLM) -> None:
    asked = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    prompts: list[Any] = [[5, 6], [7] * 500, "the cat", [999999], "a\ud800"]
    outputs = tiny_llm.generate(prompts, asked, on_error="return")
    alone = tiny_llm.generate([prompts[0], prompts[2]], asked)
    assert [output.error is None for output in outputs] == [True, False, True, False, False]
    for output, want in zip([outputs[0], outputs[2]], alone, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
    says = {1: "number 1 of 5 has 500 tokens", 3: "outside the vocabulary", 4: "not valid Unicode"}
    for place, words in says.items():
        assert words in str(outputs[place].error)


def test_a_prompt_that_is_too_long_may_lose_its_left_end(tiny_llm: LLM) -> None:
    ids = [5 + place % 200 for place in range(500)]
    asked = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (output,) = tiny_llm.generate([ids], asked, truncation="left")
    assert output.prompt_token_ids == ids[-124:]
    (scored,) = tiny_llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0), truncation="left")
    assert scored.prompt_token_ids == ids[-129:]
    with pytest.raises(ParameterError, match="truncation"):
        tiny_llm.generate([ids], truncation="right")  # type: ignore[arg-type]


def test_a_prompt_that_is_too_long_may_be_read_in_windows(tiny_llm: LLM) -> None:
    ids = [5 + place % 200 for place in range(500)]
    asked = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=2)
    (output,) = tiny_llm.generate([ids], asked, truncation="window")
    (end,) = tiny_llm.generate([ids[-124:]], asked)
    scores = tiny_llm.score([(ids[:1], ids[1:])], truncation="window")
    assert output.outputs[0].token_ids == end.outputs[0].token_ids
    assert output.prompt_token_ids == ids
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    chosen = output.prompt_logprobs[1:].chosen_entries()
    assert chosen.token_ids.tolist() == ids[1:]
    assert chosen.logprobs.tolist() == scores[0].token_logprobs
    assert output.info is not None


@pytest.mark.parametrize("name", KERNEL_EXTRAS)
def test_windows_have_the_further_columns(tiny_llm: LLM, name: str) -> None:
    ids = [5 + place % 200 for place in range(500)]
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, **{name: True})
    (output,) = tiny_llm.generate([ids], asked, truncation="window")
    (start,) = tiny_llm.generate([ids[:100]], asked)
    assert output.prompt_logprobs is not None
    assert start.prompt_logprobs is not None
    got, want = output.prompt_logprobs.extras[name], start.prompt_logprobs.extras[name]
    np.testing.assert_allclose(got[:100], want, rtol=0, atol=2e-5)
    assert np.isnan(got).tolist() == [True] + [False] * 499


def test_a_bad_pair_among_many_does_not_refuse_the_others(tiny_llm: LLM) -> None:
    pairs: list[Any] = [("the", " cat"), ("the", ""), ([5], [6] * 200), ("and", " dog"), ("a", [5])]
    scores = tiny_llm.score(pairs, on_error="return", unconditional=True)
    alone = tiny_llm.score([pairs[0], pairs[3]], unconditional=True)
    assert [score.error is None for score in scores] == [True, False, False, True, False]
    assert [scores[0], scores[3]] == alone
    says = {1: "continuation: number 1 of 5 is empty", 2: "prompt: number 2 of 5 has 201 tokens", 4: "both"}
    for place, words in says.items():
        assert words in str(scores[place].error)
        assert math.isnan(scores[place].logprob)
    with pytest.raises(ParameterError, match=r"^prompt: number 2 of 3 has 201 tokens"):
        tiny_llm.score([pairs[0], pairs[3], pairs[2]])


def test_a_pair_that_fails_while_it_runs_leaves_the_others(tiny_llm: LLM) -> None:
    with failing_steps(tiny_llm, RuntimeError("boom")):
        with pytest.raises(BatchError, match=r"request 0: .*boom") as caught:
            tiny_llm.score([([67, 6], [6])])
        assert list(caught.value.errors) == [0]
        (returned,) = tiny_llm.score([([67, 6], [6])], on_error="return")
    assert "boom" in str(returned.error)


def test_a_pair_that_is_too_long_may_be_cut_or_read_in_windows(tiny_llm: LLM) -> None:
    ids = [5 + place % 200 for place in range(500)]
    pair = (ids[:450], ids[450:])
    (left,) = tiny_llm.score([pair], truncation="left", unconditional=True)
    (end,) = tiny_llm.score([(ids[-129:-50], ids[-50:])], unconditional=True)
    assert left == end
    (windows,) = tiny_llm.score([pair], truncation="window", unconditional=True)
    assert windows.token_ids == pair[1]
    assert windows.unconditional_logprob == end.unconditional_logprob
    (whole,) = tiny_llm.score([(ids[:1], ids[1:])], truncation="window")
    assert windows.token_logprobs == whole.token_logprobs[-50:]
    with pytest.raises(ParameterError, match=r"^continuation: has 200 tokens without its context"):
        tiny_llm.score([(ids[:300], ids[300:])], truncation="left")
    with pytest.raises(ParameterError, match="truncation"):
        tiny_llm.score([pair], truncation="right")  # type: ignore[arg-type]


def test_the_default_refuses_a_long_pair(tiny_llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match="shorten it or score it in windows"):
        tiny_llm.score([([5] * 300, [6])])
