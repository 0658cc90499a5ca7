"""`LLM.score` returns all that `/v1/loglikelihood` returns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from logprobe.analysis import Score
from logprobe.records import FlatLogprobs

if TYPE_CHECKING:
    from logprobe import LLM

PAIR = ("the cat", " and the dog é🌊")


def test_the_normalised_forms_are_the_sum_by_each_unit(tiny_llm: LLM) -> None:
    (score,) = tiny_llm.score([PAIR])
    assert score.num_bytes == len(PAIR[1].encode())
    assert score.num_chars == len(PAIR[1])
    assert score.logprob == pytest.approx(math.fsum(score.token_logprobs))
    assert score.mean_logprob * score.num_tokens == pytest.approx(score.logprob)
    assert score.logprob_per_byte * score.num_bytes == pytest.approx(score.logprob)
    assert score.logprob_per_char * score.num_chars == pytest.approx(score.logprob)
    assert score.perplexity == pytest.approx(math.exp(-score.mean_logprob))
    assert score.bits_per_byte == pytest.approx(-score.logprob_per_byte / math.log(2))


def test_what_was_not_asked_for_is_none(tiny_llm: LLM) -> None:
    (score,) = tiny_llm.score([PAIR])
    assert (score.entropy, score.unconditional_logprob, score.pmi) == (None, None, None)


@pytest.mark.parametrize("pair", [PAIR, ([5, 6], [7, 8]), ([], [7, 8])])
def test_ranks_and_entropies_are_those_of_the_prompt(tiny_llm: LLM, pair: tuple[object, object]) -> None:
    from logprobe import SamplingParams

    (score,) = tiny_llm.score([pair], entropy=True)  # type: ignore[list-item]
    context = tiny_llm.text.encode(PAIR[0]).tolist() if pair is PAIR else list(pair[0]) or [0]  # type: ignore[call-overload]
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0, entropy=True)
    record = tiny_llm.generate([[*context, *score.token_ids]], asked)[0].prompt_logprobs
    assert record is not None
    assert record.entropy is not None
    assert score.entropy == pytest.approx(record.entropy[len(context) :].tolist(), abs=1e-5)
    assert score.ranks == record.chosen_entries().ranks.tolist()[len(context) :]


def test_pmi_is_the_difference_to_the_score_after_nothing(tiny_llm: LLM) -> None:
    (score,) = tiny_llm.score([PAIR], unconditional=True)
    (alone,) = tiny_llm.score([([], score.token_ids)])
    assert score.unconditional_logprob == pytest.approx(alone.logprob, abs=1e-4)
    assert score.pmi == pytest.approx(score.logprob - alone.logprob, abs=1e-4)


def test_an_impossible_token_is_minus_infinity() -> None:
    record = FlatLogprobs()
    record.append_rows([[5], [6]], [[-1.0], [-math.inf]], [1, 9])
    score = Score.of([5, 6], record, b"ab")
    assert score.logprob == -math.inf
    assert score.token_logprobs == [-1.0, -math.inf]
    assert (score.is_greedy, score.perplexity) == (False, math.inf)


def test_the_record_holds_the_alternatives_of_the_continuation_alone(tiny_llm: LLM) -> None:
    for pair in (PAIR, ("", "the cat"), ([5], [6])):
        (score,) = tiny_llm.score([pair], logprobs=3)  # type: ignore[list-item]
        assert score.record is not None
        assert len(score.record) == score.num_tokens
        assert [len(position or ()) >= 3 for position in score.record] == [True] * score.num_tokens
        assert score.record.chosen_entries().token_ids.tolist() == score.token_ids
