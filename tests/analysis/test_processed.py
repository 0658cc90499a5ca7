"""Given tokens scored under the distribution that a request would sample from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, SamplingParams
from logprobe.errors import PromptTooLongError
from logprobe.records.rows import KERNEL_EXTRAS

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT = [5, 60, 61, 70, 12]
SHAPES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.4, "top_k": 12},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.5, "presence_penalty": 0.4, "temperature": 0.9},
    {"allowed_token_ids": list(range(30, 200)), "top_k": 20},
    {"logit_bias": {7: 3.0, 9: -2.0}, "top_p": 0.8},
    {"min_tokens": 4, "stop_token_ids": (60, 61), "top_k": 50},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape) or "plain")
def test_the_tokens_that_were_drawn_have_the_numbers_of_the_draw(
    tiny_llm: LLM, shape: dict[str, Any]
) -> None:
    sampling = SamplingParams(**shape)
    drawing = SamplingParams(
        max_tokens=9, seed=3, ignore_eos=True, logprobs=2, logprobs_mode="processed_logprobs", **shape
    )
    (output,) = tiny_llm.generate([CONTEXT], drawing)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    (score,) = tiny_llm.score([(CONTEXT, completion.token_ids)], sampling_params=sampling, logprobs=2)
    assert score.record is not None
    assert score.token_ids == completion.token_ids
    np.testing.assert_allclose(
        score.token_logprobs, completion.logprobs.chosen_entries().logprobs, rtol=0, atol=2e-6
    )
    mine, theirs = score.record.log_kept_mass, completion.logprobs.log_kept_mass
    assert mine is not None
    assert theirs is not None
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)
    assert score.record[0] is not None
    assert list(score.record[0]) == list(completion.logprobs[0] or {})


def test_all_positions_at_once_are_those_of_one_after_another(tiny_llm: LLM) -> None:
    """The fast path and its slow twin: an all-zero bias is a processor, which needs one step per position."""
    pairs = [(CONTEXT, [70, 71, 5, 60]), (CONTEXT, [9]), ("the cat", " and the dog")]
    shape: dict[str, Any] = {"temperature": 0.7, "top_k": 60, "top_p": 0.95, "kept_ids": True,
                             "logprobs": 0, "logprobs_mode": "processed_logprobs"}  # fmt: skip
    fast = tiny_llm.score(pairs, sampling_params=SamplingParams(**shape), logprobs=3, entropy=True)
    slow = tiny_llm.score(
        pairs, sampling_params=SamplingParams(logit_bias={3: 0.0}, **shape), logprobs=3, entropy=True
    )
    for one, other in zip(fast, slow, strict=True):
        assert one.record is not None
        assert other.record is not None
        assert (one.token_ids, one.ranks) == (other.token_ids, other.ranks)
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, rtol=0, atol=2e-6)
        np.testing.assert_allclose(one.entropy or [], other.entropy or [], rtol=0, atol=1e-5)
        assert one.record.kept is not None
        assert other.record.kept is not None
        assert one.record.kept == other.record.kept
        for record in (one.record, other.record):
            assert record.info is not None
            assert record.info.stages == ("processed",)
            assert (record.info.temperature, record.info.top_k) == (0.7, 60)
    raw = tiny_llm.score(pairs)
    assert [score.token_logprobs for score in tiny_llm.score(pairs)] == [one.token_logprobs for one in raw]


def test_raw_numbers_at_the_temperature_follow_from_the_kept_mass(tiny_llm: LLM) -> None:
    """A trainer's full softmax at the sampler's temperature, from the numbers of a truncated sampler."""
    given = [70, 71, 5, 60]
    cut = SamplingParams(temperature=0.7, top_k=100)
    (processed,) = tiny_llm.score([(CONTEXT, given)], sampling_params=cut)
    (whole,) = tiny_llm.score([(CONTEXT, given)], sampling_params=SamplingParams(temperature=0.7))
    assert processed.record is not None
    is_kept = np.isfinite(processed.token_logprobs)
    assert is_kept.sum() > 0
    raw = np.array(processed.token_logprobs) + processed.record.log_kept_mass
    np.testing.assert_allclose(raw[is_kept], np.array(whole.token_logprobs)[is_kept], rtol=0, atol=1e-5)


def test_a_token_that_could_not_be_drawn_is_minus_infinity(tiny_llm: LLM) -> None:
    greedy = tiny_llm.generate([CONTEXT], SamplingParams(max_tokens=1, temperature=0))[0].outputs[0]
    other = 7 if greedy.token_ids != [7] else 8
    (score,) = tiny_llm.score([(CONTEXT, [other, 5])], sampling_params=SamplingParams(top_k=1))
    assert score.token_logprobs[0] == -np.inf
    assert score.logprob == -np.inf
    assert not score.is_greedy


def test_many_pairs_and_long_ones_and_what_a_text_is(tiny_llm: LLM) -> None:
    plain = SamplingParams()
    long = [5 + place % 200 for place in range(200)]
    pairs: list[Any] = [("the cat", " and the dog"), (long[:120], long[120:]), (long[:100], long[100:])]
    scores = tiny_llm.score(
        pairs, sampling_params=plain, truncation="window", unconditional=True, entropy=True
    )
    raw = tiny_llm.score(pairs, truncation="window", unconditional=True, entropy=True)
    for one, other in zip(scores, raw, strict=True):
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, rtol=0, atol=2e-5)
        np.testing.assert_allclose(one.entropy or [], other.entropy or [], rtol=0, atol=2e-5)
        assert one.pmi == pytest.approx(other.pmi, abs=2e-4)
    with pytest.raises(PromptTooLongError, match="number 1 of 3 has 200 tokens with its continuation"):
        tiny_llm.score(pairs, sampling_params=plain)


@pytest.mark.parametrize("name", KERNEL_EXTRAS)
def test_further_columns_are_those_of_the_call_not_of_what_is_drawn_from(tiny_llm: LLM, name: str) -> None:
    asking = SamplingParams(logprobs=0, **{name: True})
    (score,) = tiny_llm.score([(CONTEXT, [70, 71])], sampling_params=asking)
    assert score.record is not None
    assert name not in score.record.extras


def test_given_tokens_run_on_their_lora(tiny_llm: LLM, adapter_folders: dict[str, Path]) -> None:
    tiny_llm.add_lora("forced", adapter_folders["wide"])
    try:
        pair = (CONTEXT, [70, 71])
        tuned = tiny_llm.with_lora("forced")
        (score,) = tuned.score([pair], sampling_params=SamplingParams())
        (raw,) = tuned.score([pair])
        (base,) = tiny_llm.score([pair])
    finally:
        tiny_llm.remove_lora("forced")
    np.testing.assert_allclose(score.token_logprobs, raw.token_logprobs, rtol=0, atol=2e-5)
    assert np.abs(np.array(score.token_logprobs) - base.token_logprobs).max() > 1e-3
