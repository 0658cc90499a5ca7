"""Uncertainty of sampled answers, compared with transformers' rows and with worked examples."""

from __future__ import annotations

import asyncio
import json
import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from async_twin import async_twin
from logprobe import LLM, SamplingParams
from logprobe.analysis import LowConfidence, SampledAnswer, measures
from logprobe.analysis.client import ScoringClient
from logprobe.analysis.uncertainty import Growing, draw_plan
from logprobe.errors import ParameterError, WeightsReplacedError
from logprobe.testing import check_integrity, open_requests, watching_steps
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from logprobe import RequestOutput
    from logprobe.engine.protocol import StepBatch

PROMPT = "the cat and"
TALK = [{"role": "user", "content": "the cat"}]
LONG = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
LIMIT_S = 120  # generous, also for a busy machine
# Our float32 rows against float64: logits of about ten nats, a few ulp each.
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path, adapter_folders: dict[str, Path]) -> Iterator[LLM]:
    """The tiny Llama with LoRA weights; its results do not depend on the batch."""
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        llm.add_lora("wide", adapter_folders["wide"])
        yield llm


@pytest.fixture(scope="module")
def rows(tiny_model_folder: Path) -> Any:
    """Return a function from ids to (T, V) log-probabilities of transformers, float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder).double().eval()

    @torch.inference_mode()
    def of(ids: list[int]) -> Any:
        return model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()

    return of


def ids_of(llm: LLM, prompt: str = PROMPT) -> list[int]:
    ids: list[int] = llm.text.encode(prompt).tolist()
    return ids


# -- figures of each answer ----------------------------------------------------------------------------------


def test_every_figure_of_an_answer_is_that_of_whole_rows(tiny_llm: LLM, rows: Any) -> None:
    params = SamplingParams(max_tokens=12, seed=3)
    found = tiny_llm.uncertainty(PROMPT, 5, params, window=4, k=7, self_certainty=True)
    before = ids_of(tiny_llm)
    assert len(found.answers) == 5
    for answer in found.answers:
        ids = answer.token_ids
        whole = rows([*before, *ids])[len(before) - 1 : -1]
        logprobs = whole[np.arange(len(ids)), ids]
        entropy = -(np.exp(whole) * whole).sum(-1)
        confidence = -np.sort(whole, axis=-1)[:, -7:].mean(-1)
        groups = [confidence[at : at + 4].mean() for at in range(max(len(ids) - 4, 0) + 1)]
        np.testing.assert_allclose(answer.token_logprobs, logprobs, **CLOSE)
        np.testing.assert_allclose(answer.entropy, entropy, **CLOSE)
        np.testing.assert_allclose(answer.confidence, confidence, **CLOSE)
        np.testing.assert_allclose(answer.group_confidence, groups, **CLOSE)
        assert answer.logprob == pytest.approx(logprobs.sum(), abs=1e-3)
        assert answer.perplexity == pytest.approx(np.exp(-logprobs.mean()), rel=1e-3)
        assert answer.mean_logprob == pytest.approx(logprobs.mean(), abs=1e-4)
        assert answer.mean_token_entropy == pytest.approx(entropy.mean(), abs=1e-4)
        assert answer.max_token_entropy == pytest.approx(entropy.max(), abs=1e-4)
        assert answer.lowest_group_confidence == pytest.approx(min(groups), abs=1e-4)
        assert answer.tail_confidence == pytest.approx(confidence[-4:].mean(), abs=1e-4)
        certainty = (-whole.mean(-1) - np.log(whole.shape[-1])).mean()
        assert answer.self_certainty == pytest.approx(certainty, abs=1e-4)
        assert answer.text == tiny_llm.text.text_of(ids)
        assert answer.num_tokens == len(ids) <= 12


def test_the_end_of_an_answer_counts_to_its_probability(tiny_llm: LLM, rows: Any) -> None:
    (eos,) = tiny_llm.text.tokenizer.convert_tokens_to_ids(["<|eos|>"])
    params = SamplingParams(max_tokens=3, seed=1, logit_bias={eos: 100.0})
    (answer,) = tiny_llm.uncertainty(PROMPT, 1, params).answers
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([eos], "", "stop")
    assert answer.logprob == pytest.approx(rows(ids_of(tiny_llm))[-1, eos], abs=1e-4)
    assert answer.drawn_logprob == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "shape",
    [{"temperature": 0.6}, {"temperature": 1.3, "top_k": 12}, {"top_p": 0.7}, {"bad_words": [" the"]}],
    ids=str,
)
def test_the_distribution_that_was_drawn_from_is_another(tiny_llm: LLM, shape: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=8, seed=2, **shape)
    found, before = tiny_llm.uncertainty(PROMPT, 3, params), ids_of(tiny_llm)
    pairs = [(before, answer.token_ids) for answer in found.answers]
    raw = tiny_llm.score(pairs)
    drawn = tiny_llm.score(pairs, sampling_params=SamplingParams(**shape))
    for answer, one, other in zip(found.answers, raw, drawn, strict=True):
        # Scored in one batch and sampled token by token: the last bits of float32 sums differ.
        np.testing.assert_allclose(answer.token_logprobs, one.token_logprobs, rtol=0, atol=5e-6)
        np.testing.assert_allclose(answer.drawn_token_logprobs, other.token_logprobs, rtol=0, atol=5e-6)
    want = -np.mean([score.logprob for score in drawn])
    assert found.monte_carlo_sequence_entropy == pytest.approx(want, abs=1e-4)
    assert any(abs(one.logprob - other.logprob) > 1e-3 for one, other in zip(raw, drawn, strict=True))


def test_at_temperature_one_both_distributions_are_one(llm: LLM) -> None:
    for answer in llm.uncertainty(PROMPT, 4, SamplingParams(max_tokens=9, seed=8)).answers:
        np.testing.assert_allclose(answer.drawn_token_logprobs, answer.token_logprobs, rtol=0, atol=1e-6)


def test_an_answer_among_others_has_the_bits_of_its_score_alone(llm: LLM) -> None:
    found, before = llm.uncertainty(PROMPT, 6, LONG), ids_of(llm)
    for answer in found.answers:
        (score,) = llm.score([(before, answer.token_ids)], entropy=True)
        assert (answer.token_logprobs, answer.entropy) == (score.token_logprobs, score.entropy)
        assert answer.logprob == score.logprob


def test_few_whole_rows_at_a_time_give_the_same_self_certainty(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=11, seed=8)
    at_once = llm.uncertainty(PROMPT, 2, params, self_certainty=True)
    assert llm.uncertainty(PROMPT, 2, params).answers[0].self_certainty is None
    monkeypatch.setattr("logprobe.analysis.client.ROWS_BYTES", 3 * 8 * llm.engine.capabilities().vocab_size)
    in_parts = llm.uncertainty(PROMPT, 2, params, self_certainty=True)
    for one, other in zip(at_once.answers, in_parts.answers, strict=True):
        assert one.self_certainty == pytest.approx(other.self_certainty, rel=1e-12)


# -- sampling ------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_answers_each_time(llm: LLM) -> None:
    first = llm.uncertainty(PROMPT, 4, LONG)
    assert llm.uncertainty(PROMPT, 4, LONG) == first
    assert llm.uncertainty(PROMPT, 3, LONG).answers == first.answers[:3]
    assert len({tuple(answer.token_ids) for answer in first.answers}) == 4
    [generated] = llm.generate(PROMPT, LONG)
    assert first.answers[0].token_ids == generated.outputs[0].token_ids
    other = llm.uncertainty(PROMPT, 4, SamplingParams(max_tokens=40, seed=6, ignore_eos=True))
    drawn = [{tuple(answer.token_ids) for answer in found.answers} for found in (first, other)]
    assert not drawn[0] & drawn[1]


def test_without_a_seed_answers_differ(llm: LLM) -> None:
    found = llm.uncertainty(PROMPT, 4, SamplingParams(max_tokens=40, ignore_eos=True))
    assert len({tuple(answer.token_ids) for answer in found.answers}) == 4


def test_ids_a_text_and_a_conversation_are_prompts(llm: LLM) -> None:
    by_ids = llm.uncertainty(ids_of(llm), 2, LONG)
    assert by_ids == llm.uncertainty(PROMPT, 2, LONG)
    [output] = llm.chat(TALK, LONG)
    talked = llm.uncertainty(TALK, 2, LONG)
    assert talked.answers[0].token_ids == output.outputs[0].token_ids
    assert talked.answers[0].text == output.outputs[0].text


def test_an_answer_is_cut_where_its_stop_string_says_so(llm: LLM) -> None:
    (free,) = llm.uncertainty(PROMPT, 1, LONG).answers
    stop = next(character for character in free.text if character.isascii() and character.isalpha())
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True, stop=stop)
    (cut,) = llm.uncertainty(PROMPT, 1, params).answers
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.stopped_early) == ("stop", False)


def test_one_greedy_answer_may_be_asked_for(llm: LLM) -> None:
    found = llm.uncertainty(PROMPT, 1, SamplingParams(max_tokens=5, temperature=0))
    [output] = llm.generate(PROMPT, SamplingParams(max_tokens=5, temperature=0))
    assert found.answers[0].token_ids == output.outputs[0].token_ids
    assert (found.num_semantic_sets, found.share, found.semantic_entropy) == (1, 1.0, 0.0)


@pytest.mark.parametrize("lora", [None, "wide"])
def test_an_event_loop_gets_the_same_bits(llm: LLM, lora: str | None) -> None:
    near: Any = llm.with_lora(lora)

    lm = async_twin(near)

    async def ask() -> list[Any]:
        return await asyncio.gather(
            lm.uncertainty(PROMPT, 3, LONG),
            lm.uncertainty(TALK, n=2, sampling_params=LONG, self_certainty=True, k=5, window=3),
        )

    one, other = asyncio.run(ask())
    assert one == near.uncertainty(PROMPT, 3, LONG)
    assert other == near.uncertainty(TALK, 2, LONG, self_certainty=True, k=5, window=3)


def test_lora_weights_of_the_parameters_are_those_of_a_view(llm: LLM) -> None:
    tuned = SamplingParams(max_tokens=9, seed=5, lora="wide")
    by_params = llm.uncertainty(PROMPT, 2, tuned, self_certainty=True)
    viewed = llm.with_lora("wide").uncertainty(
        PROMPT, 2, SamplingParams(max_tokens=9, seed=5), self_certainty=True
    )
    assert by_params == viewed


# -- figures of all answers ----------------------------------------------------------------------------------


def answer(
    text: str, token_ids: Sequence[int], probability: float, *, confidence: float = 1.0, stopped: bool = False
) -> SampledAnswer:
    each = [math.log(probability) / len(token_ids)] * len(token_ids)
    return SampledAnswer(
        text=text,
        token_ids=[*token_ids],
        token_logprobs=[value - 1.0 for value in each],  # not used by the figures of all answers
        drawn_token_logprobs=each,
        entropy=[0.5] * len(each),
        confidence=[confidence] * len(each),
        window=2,
        finish_reason="abort" if stopped else "stop",
        stopped_early=stopped,
    )


PARIS = [
    answer("Rome", [4, 2], 0.1),
    answer("Paris", [1, 2], 0.4),
    answer(" Paris\n", [3, 2, 2], 0.2),
    answer("Paris", [1, 2], 0.4),
]


def entropy_of(*shares: float) -> float:
    return -sum(share * math.log(share) for share in shares)


def test_figures_of_all_answers_worked_by_hand() -> None:
    found = draw_plan(4).sum_up(PARIS)
    assert found.semantic_sets == ((1, 2, 3), (0,))
    np.testing.assert_allclose(np.exp(found.set_logprobs), [0.6, 0.1])
    np.testing.assert_allclose(found.shares, [6 / 7, 1 / 7])
    assert found.mass == pytest.approx(0.7)
    assert found.share == pytest.approx(6 / 7)
    assert found.best is PARIS[1]
    assert found.semantic_entropy == pytest.approx(entropy_of(6 / 7, 1 / 7))
    assert found.discrete_semantic_entropy == pytest.approx(entropy_of(3 / 4, 1 / 4))
    assert found.monte_carlo_semantic_entropy == pytest.approx(-(3 * math.log(0.6) + math.log(0.1)) / 4)
    logs = {name: math.log(value) for name, value in {"p": 0.4, "q": 0.2, "r": 0.1}.items()}
    assert found.monte_carlo_sequence_entropy == pytest.approx(-(2 * logs["p"] + logs["q"] + logs["r"]) / 4)
    want = -(2 * logs["p"] / 2 + logs["q"] / 3 + logs["r"] / 2) / 4
    assert found.monte_carlo_normalized_sequence_entropy == pytest.approx(want)
    assert repr(found) == (
        "<Uncertainty: 'Paris' has a share of 0.857; 4 answers in 2 sets; semantic entropy "
        f"{found.semantic_entropy:.4f} nats>"
    )
    assert "'Rome', -4.3026 nats over 2 tokens" in repr(found.answers[0])


def test_answers_that_all_mean_one_thing_have_no_entropy() -> None:
    found = draw_plan(4).sum_up(PARIS, lambda *_: True)
    assert found.num_semantic_sets == 1
    assert (found.share, found.semantic_entropy, found.discrete_semantic_entropy) == (1.0, 0.0, 0.0)
    assert math.copysign(1, found.semantic_entropy) == 1
    assert found.mass == pytest.approx(0.7)


def test_an_answer_that_was_stopped_counts_in_no_figure() -> None:
    early = answer("Par", [1], 0.9, stopped=True)
    found, whole = draw_plan(5).sum_up([early, *PARIS]), draw_plan(4).sum_up(PARIS)
    figures = [name for name, value in whole.to_dict().items() if isinstance(value, float)]
    assert len(figures) == 7
    for name in figures:
        assert getattr(found, name) == pytest.approx(getattr(whole, name)), name
    assert found.semantic_sets == ((2, 3, 4), (1,))
    assert found.answers[0] is early
    assert "1 stopped early" in repr(found)
    assert "stopped early" in repr(early)


def test_of_no_answer_nothing_is_known() -> None:
    found = draw_plan(2).sum_up([answer("Par", [1], 0.9, stopped=True)] * 2)
    assert (found.best, found.num_semantic_sets, found.mass) == (None, 0, 0.0)
    figures = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert figures["semantic_entropy"] is None
    assert figures["share"] is None
    assert figures["monte_carlo_sequence_entropy"] is None
    assert "all 2 answers stopped early" in repr(found)


def test_a_result_is_json(llm: LLM) -> None:
    found = llm.uncertainty(PROMPT, 3, SamplingParams(max_tokens=4, seed=1), self_certainty=True)
    figures = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert figures["semantic_entropy"] == found.semantic_entropy
    assert figures["answers"][1]["self_certainty"] == found.answers[1].self_certainty
    assert [one["token_ids"] for one in figures["answers"]] == [one.token_ids for one in found.answers]
    assert found.best is not None
    assert figures["best"] == found.best.text


def test_an_impossible_answer_is_json() -> None:
    never = answer("no", [1], 0.5)
    never.token_logprobs[0] = -math.inf
    figures = never.to_dict()
    assert (figures["logprob"], figures["perplexity"]) == (-9999.0, 9999.0)
    json.dumps(figures, allow_nan=False)


def test_texts_are_compared_with_the_first_of_each_set_and_once() -> None:
    seen: list[tuple[str, str]] = []

    def same(text: str, other: str) -> bool:
        seen.append((text, other))
        return text[0] == other[0]

    texts = ["apple", "bread", "axe", "bread", "apple", "cake"]
    answers = [answer(text, [place], 0.1) for place, text in enumerate(texts)]
    found = draw_plan(6).sum_up(answers, same)
    assert found.semantic_sets == ((0, 2, 4), (1, 3), (5,))
    pairs = [("apple", "bread"), ("apple", "axe"), ("apple", "cake"), ("bread", "cake")]
    assert seen == pairs


def test_what_says_whether_texts_mean_the_same_may_ask_the_model(llm: LLM) -> None:
    asked = []

    def same(text: str, other: str) -> bool:
        asked.append(text)
        return bool(llm.score([(PROMPT, f" {text[:4]} {other[:4]}")])[0].logprob > -math.inf)

    assert llm.uncertainty(PROMPT, 3, LONG, same=same).num_semantic_sets == 1
    assert len(asked) == 2
    found = asyncio.run(asyncio.wait_for(async_twin(llm).uncertainty(PROMPT, 3, LONG, same=same), LIMIT_S))
    assert found.num_semantic_sets == 1


def test_what_gives_no_yes_or_no_is_refused() -> None:
    for same in (lambda *_: 0.7, lambda *_: None, lambda *_: object()):
        with raises(ParameterError, parameter="same"):
            draw_plan(4).sum_up(PARIS, same)  # type: ignore[arg-type]


# -- early stopping ------------------------------------------------------------------------------------------


def first_below(confidence: Sequence[float], rule: LowConfidence) -> int | None:
    """Return after how many tokens the mean of the last `window` is below the threshold, by a plain loop."""
    for end in range(rule.window, len(confidence) + 1):
        if np.mean(confidence[end - rule.window : end]) < rule.threshold:
            return end
    return None


def test_an_answer_ends_with_the_first_group_below_the_threshold(llm: LLM) -> None:
    whole = llm.uncertainty(PROMPT, 8, LONG, window=3, k=5)
    lowest = sorted(one.lowest_group_confidence for one in whole.answers)
    rule = LowConfidence(threshold=float(np.mean(lowest[3:5])), window=3, k=5)
    found = llm.uncertainty(PROMPT, 8, LONG, stop_when=rule)
    ends = [first_below(one.confidence, rule) for one in whole.answers]
    assert sum(end is not None for end in ends) == 4
    for one, full, end in zip(found.answers, whole.answers, ends, strict=True):
        is_early = end is not None and end < full.num_tokens
        assert one.stopped_early == is_early
        assert one.token_ids == full.token_ids[:end]
        assert one.token_logprobs == full.token_logprobs[:end]
        assert one.drawn_token_logprobs == full.drawn_token_logprobs[:end]
        assert one.confidence == full.confidence[:end]
        assert one.record is not None
        assert len(one.record) == one.num_tokens
        if is_early:
            assert (one.finish_reason, one.text) == ("abort", llm.text.text_of(one.token_ids))
            assert one.lowest_group_confidence == one.tail_confidence < rule.threshold
        else:
            assert one == full
    assert found == llm.uncertainty(PROMPT, 8, LONG, stop_when=rule)


def test_a_threshold_below_all_groups_ends_nothing(llm: LLM) -> None:
    rule = LowConfidence(threshold=1e-6, window=3, k=5)
    found = llm.uncertainty(PROMPT, 4, LONG, stop_when=rule)
    assert found == llm.uncertainty(PROMPT, 4, LONG, window=3, k=5)
    assert llm.uncertainty(PROMPT, 4, LONG, stop_when=rule, window=3, k=5) == found


def test_an_event_loop_ends_the_same_answers(llm: LLM) -> None:
    rule = LowConfidence(threshold=100.0, window=3, k=5)
    found = asyncio.run(async_twin(llm).uncertainty(PROMPT, 3, LONG, stop_when=rule))
    assert [one.num_tokens for one in found.answers] == [3, 3, 3]
    assert all(one.stopped_early for one in found.answers)
    assert found == llm.uncertainty(PROMPT, 3, LONG, stop_when=rule)


def test_an_answer_that_ends_by_itself_there_is_whole(llm: LLM) -> None:
    """The group falls below the threshold at the token that ends the answer by a stop id."""
    (free,) = llm.uncertainty(PROMPT, 1, LONG).answers
    place = next(at for at in range(3, 40) if free.token_ids[at] not in free.token_ids[:at])
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True, stop_token_ids=(free.token_ids[place],))
    rule = LowConfidence(threshold=100.0, window=place + 1, k=5)
    (one,) = llm.uncertainty(PROMPT, 1, params, stop_when=rule).answers
    assert one.token_ids == free.token_ids[: place + 1]
    assert (one.finish_reason, one.stopped_early) == ("stop", False)


def test_the_engine_computes_no_more_of_what_was_ended(llm: LLM) -> None:
    num_steps = 0

    def wait(_: StepBatch) -> None:
        # A reader may lag behind a small model, so wait until it has ended all answers.
        nonlocal num_steps
        num_steps += 1
        until = time.monotonic() + LIMIT_S
        while num_steps > 30 and open_requests(llm):
            assert time.monotonic() < until
            time.sleep(0.005)

    params = SamplingParams(max_tokens=100, seed=5, ignore_eos=True)
    with watching_steps(llm, wait):
        rule = LowConfidence(threshold=100.0, window=10, k=5)
        found = llm.uncertainty(PROMPT, 3, params, stop_when=rule)
    assert [one.num_tokens for one in found.answers] == [10, 10, 10]
    assert num_steps < 60
    llm.generate(PROMPT, SamplingParams(max_tokens=1))  # runs after all of them have been removed
    check_integrity(llm)


def test_confidence_that_comes_in_pieces_is_that_of_the_whole(llm: LLM) -> None:
    (full,) = llm.uncertainty(PROMPT, 1, LONG, window=4, k=5).answers
    assert full.record is not None
    rule = LowConfidence(threshold=float(np.median(full.group_confidence)), window=4, k=5)
    want = first_below(full.confidence, rule)
    for size in (1, 3, 40):
        growing = Growing(rule)
        ends = [end for end in range(size, 40 + size, size) if growing(full.record[:end])]
        assert want is not None
        assert ends[0] - size < want <= ends[0]


@pytest.mark.parametrize(("window", "want"), [(1, [1, 2, 4, 8]), (2, [1.5, 3, 6]), (4, [3.75]), (9, [3.75])])
def test_means_of_groups(window: int, want: list[float]) -> None:
    np.testing.assert_allclose(measures.group_means([1, 2, 4, 8], window), want)


# -- invalid requests ----------------------------------------------------------------------------------------

RULE = LowConfidence(threshold=1.0, window=4, k=5)


@pytest.mark.parametrize(
    ("parameter", "asked"),
    [
        *(("n", {"n": n}) for n in (0, -1, True, 2.0, "3")),
        ("n", {"sampling_params": SamplingParams(n=2)}),
        ("best_of", {"sampling_params": SamplingParams(best_of=3)}),
        ("logprobs", {"sampling_params": SamplingParams(logprobs=3)}),
        ("prompt_logprobs", {"sampling_params": SamplingParams(prompt_logprobs=0)}),
        ("sampling_params", {"sampling_params": {"max_tokens": 3}}),
        ("max_tokens", {"sampling_params": SamplingParams(max_tokens=0)}),
        ("temperature", {"sampling_params": SamplingParams(temperature=0)}),
        ("window", {"window": 0}),
        ("k", {"k": 0}),
        ("k", {"k": 1.5}),
        ("stop_when", {"stop_when": 1.0}),
        ("window", {"stop_when": RULE, "window": 5}),
        ("k", {"stop_when": RULE, "k": 6}),
        ("window", {"stop_when": RULE, "sampling_params": SamplingParams(max_tokens=4)}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ["the cat", "a dog"]}),
        ("prompt", {"prompt": 5}),
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": [10**6]}),
        ("messages[0].role", {"prompt": [{"content": "the cat"}]}),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_named(llm: LLM, parameter: str, asked: dict[str, Any]) -> None:
    with raises(ParameterError, parameter=parameter):
        llm.uncertainty(**{"prompt": PROMPT, **asked})
    assert open_requests(llm) == []


@pytest.mark.parametrize(
    ("parameter", "asked"),
    [
        *(("threshold", {"threshold": value}) for value in (0, -1.0, math.inf, math.nan, "1", True, None)),
        *(("window", {"threshold": 1.0, "window": value}) for value in (0, -3, 2.5, True)),
        *(("k", {"threshold": 1.0, "k": value}) for value in (0, -1, 2.5)),
    ],
    ids=str,
)
def test_a_rule_that_ends_nothing_is_named(parameter: str, asked: dict[str, Any]) -> None:
    with raises(ParameterError, parameter=parameter):
        LowConfidence(**asked)


def test_more_alternatives_than_a_model_allows_are_refused(llm: LLM) -> None:
    capped = ScoringClient(llm.engine, llm.text, max_logprobs=6)
    plan = draw_plan(2, SamplingParams(max_tokens=3), k=6)
    assert len(asyncio.run(capped.draw(PROMPT, plan))) == 2
    with raises(ParameterError, parameter="k"):
        asyncio.run(capped.draw(PROMPT, draw_plan(2)))
    with raises(ParameterError, parameter="self_certainty"):
        asyncio.run(capped.draw(PROMPT, draw_plan(2, k=6, self_certainty=True)))


def test_a_bar_sees_answers_that_are_ended_end(llm: LLM) -> None:
    last: dict[str, RequestOutput] = {}

    @contextmanager
    def watch(requests: Sequence[Any]) -> Iterator[Any]:
        yield lambda output: last.__setitem__(output.request_id, output)
        assert {request.request_id for request in requests} == {*last}

    plan = draw_plan(3, LONG, stop_when=LowConfidence(threshold=100.0, window=3, k=5))
    answers = asyncio.run(llm._client.draw(PROMPT, plan, watch=watch))
    assert [one.num_tokens for one in answers] == [3, 3, 3]
    assert all(output.is_finished for output in last.values())
    assert len(last) == 3


def test_answers_of_other_weights_are_not_summed_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run = llm._client.run

    async def replaced(*args: Any) -> list[RequestOutput]:
        outputs = await run(*args)
        outputs[-1].weights_number += 1
        return outputs

    monkeypatch.setattr(llm._client, "run", replaced)
    with pytest.raises(WeightsReplacedError):
        llm.uncertainty(PROMPT, 3, SamplingParams(max_tokens=2))
