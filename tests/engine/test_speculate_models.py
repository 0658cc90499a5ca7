"""Speculation on real layers: the same tokens, and numbers within the tolerance between batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logprobe import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LONG = {"max_tokens": 60, "ignore_eos": True, "logprobs": 3}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs_mode": "both", "entropy": True, "prompt_logprobs": 2},
    {"temperature": 0.3, "seed": 5},
    {"temperature": 0.3, "n": 3, "seed": 6, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {9: 3.0}, "min_tokens": 20},
]
PROMPTS = [list(range(2, 40)) + list(range(2, 20)), [7, 8, 9] * 6, [50, 60, 70]]


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft in every step, also with many rows in the batch, so that many drafts are wrong."""
    monkeypatch.setattr("logprobe.engine.plan.drafts.FREE_ROWS", 1000)


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("fixture", ["new_engine", "new_window_engine"])
def test_mixed_requests_give_the_numbers_that_each_gets_alone(
    fixture: str, request: pytest.FixtureRequest, assert_same: Callable[..., None]
) -> None:
    new_engine = request.getfixturevalue(fixture)
    engine = new_engine(800, max_num_batched_tokens=24, max_num_seqs=40, speculate=True)
    asked = [(ids, LONG | kind) for ids in PROMPTS for kind in KINDS]
    got = [engine.submit(f"r{place}", ids, **params) for place, (ids, params) in enumerate(asked)]
    engine.run()
    engine.assert_idle()
    stats = engine.engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    for mine, (ids, params) in zip(got, asked, strict=True):
        alone = new_engine(800)
        want = alone.submit("alone", ids, **params)
        alone.run()
        assert_same(mine, want)


def test_a_preempted_request_drafts_on_with_the_same_tokens(
    new_engine: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    asked = {"max_tokens": 40, "logprobs": 3, "temperature": 0.0, "ignore_eos": True}
    engine = new_engine(90, max_num_batched_tokens=32, max_num_seqs=16, speculate=True)
    prompts = [[20 + index, 30, 40 + index] * 4 for index in range(4)]
    got = [engine.submit(f"r{index}", ids, **asked) for index, ids in enumerate(prompts)]
    engine.run()
    assert engine.scheduler.num_preempted > 0, "the pool is too large for this test"
    assert engine.scheduler.drafts.num_accepted > 0
    engine.assert_idle()
    for ids, mine in zip(prompts, got, strict=True):
        alone = new_engine(90)
        want = alone.submit("alone", ids, **asked)
        alone.run()
        assert_same(mine, want)


@pytest.mark.usefixtures("_eager")
def test_with_published_weights_the_numbers_are_the_same_bits(tiny_model_folder: Path) -> None:
    settings: dict[str, Any] = {"weights": "checkpoint", "kv_cache_memory_bytes": 1 << 21}

    def rows(*, speculate: bool) -> Any:
        with LLM(str(tiny_model_folder), speculate=speculate, **settings) as llm:
            outputs = [
                one
                for ids in PROMPTS
                for kind in KINDS
                for one in llm.generate([ids], SamplingParams(**LONG | kind), progress=False)
            ]
            assert (llm.engine.stats().accepted_tokens > 0) is speculate
            assert llm.engine.capabilities().speculate is speculate
        return [
            (one.token_ids, one.logprobs.to_bytes(), one.cumulative_logprob)
            for output in outputs
            for one in output.outputs
            if one.logprobs is not None
        ]

    assert rows(speculate=True) == rows(speculate=False)


def test_a_grammar_drafts_nothing_and_says_so(tiny_model_folder: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, response_format={"type": "json_object"})
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21, speculate=True) as llm:
        [output] = llm.generate([[7, 8, 9, 7, 8, 9]], params, progress=False)
    drafts = output.outputs[0].drafts
    assert drafts is not None
    assert drafts.num_drafted == 0
    assert drafts.refusal == "GrammarLogitsProcessor keeps state"


def test_a_stream_comes_to_the_whole(tiny_model_folder: Path) -> None:
    params = SamplingParams(**LONG | {"temperature": 0})
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21, speculate=True) as llm:
        lengths, text = [], ""
        for growing in llm.stream([7, 8, 9] * 6, params):
            lengths.append(len(growing.outputs[0].token_ids))
            text = growing.outputs[0].text
        llm.engine.forget_prefixes()
        [whole] = llm.generate([[7, 8, 9] * 6], params, progress=False)
    assert text == whole.outputs[0].text
    assert lengths == sorted(lengths)
    assert lengths[-1] == len(whole.outputs[0].token_ids) == 60
