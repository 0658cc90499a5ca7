"""Processors in a running engine: batches, samples, preemption, streams, failures, explanations."""

# ruff: noqa: ARG002 - an interface's arguments, used or not
from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from logprobe import SamplingParams
from logprobe.errors import BatchError, NonFiniteLogitsError, ParameterError, ProcessorError
from logprobe.processors import BatchState, CaptureLogitsProcessor, LogitsProcessor
from logprobe.testing import check_integrity
from logprobe.transport.messages import Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe import LLM
    from logprobe.config import EngineConfig

VOCAB_SIZE = 288


class YourLogitsProcessor(LogitsProcessor):
    """Written only from a slot-based engine's published sample."""

    def __init__(self, fd_config: Any) -> None:
        self.enabled: list[Any] = []

    def update_state(self, share_inputs: dict[str, Any]) -> None:  # type: ignore[override]
        stop_flags = share_inputs["stop_flags"]
        args = share_inputs["logits_processors_args"]
        args = [a for a, f in zip(args, stop_flags, strict=True) if not f]
        self.enabled = [a.enable_your_logits_processor for a in args]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for i, enabled in enumerate(self.enabled):
            if enabled:
                logits[i, 77] = 1000.0
        return logits


class FollowArgs(msgspec.Struct, kw_only=True):
    follow: bool = False
    fail_at: int | None = None


class FollowLogitsProcessor(LogitsProcessor):
    """Force the next token to 100 + the number of generated tokens mod 100."""

    Args = FollowArgs

    def __init__(self, config: EngineConfig) -> None:
        self.states: dict[Any, int] = {}
        self.rows: list[tuple[int, bool]] = []
        self.num_dropped = 0

    def update_state(self, batch: BatchState) -> None:
        for gone in batch.removed:
            del self.states[gone.key]
            self.num_dropped += 1
        for row in batch.rows:
            num_seen = self.states.get(row.key, 0)
            for place, token_id in enumerate(row.output_token_ids[num_seen:]):
                assert token_id == 100 + (num_seen + place) % 100, "observed in order, once each"
            self.states[row.key] = len(row.output_token_ids)
        self.rows = [(self.states[row.key], self.states[row.key] == row.args.fail_at) for row in batch.rows]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if any(is_failing for _, is_failing in self.rows):
            raise RuntimeError("told to fail")
        for row, (count, _) in zip(logits, self.rows, strict=True):
            row[:] = -torch.inf
            row[100 + count % 100] = 0.0
        return logits


FOLLOW: dict[str, Any] = {"logits_processors_args": {"follow": True}, "ignore_eos": True}


def counting(num_tokens: int) -> list[int]:
    return [100 + index % 100 for index in range(num_tokens)]


def prompts(num: int, length: int = 6) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(2, VOCAB_SIZE, length).tolist() for _ in range(num)]


@pytest.fixture(scope="module")
def llm(new_llm: Callable[..., LLM]) -> LLM:
    return new_llm(
        YourLogitsProcessor, FollowLogitsProcessor, "LogitBiasLogitsProcessor", CaptureLogitsProcessor
    )


def test_a_processor_from_a_published_sample_runs_unchanged(llm: LLM) -> None:
    on = SamplingParams(
        temperature=0, max_tokens=4, logits_processors_args={"enable_your_logits_processor": 1}
    )
    off = SamplingParams(
        temperature=0, max_tokens=4, logits_processors_args={"enable_your_logits_processor": 0}
    )
    plain = SamplingParams(temperature=0, max_tokens=4)
    first, second, third = (out.outputs[0].token_ids for out in llm.generate([[5, 6]] * 3, [on, off, plain]))
    assert first == [77] * 4
    assert second == third != first


def test_requests_without_arguments_get_the_same_bits_beside_those_with_them(llm: LLM) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "logprobs": 5, "logprobs_mode": "both", "entropy": True}
    plain = [SamplingParams(**asked, seed=seed) for seed in range(4)]
    alone = llm.generate(prompts(4), plain)
    changed = SamplingParams(**asked, seed=9, logit_bias={3: 5.0}, **FOLLOW)
    mixed = llm.generate(
        [one for prompt in prompts(4) for one in (prompt, prompt)],
        [one for params in plain for one in (params, changed)],
    )[::2]
    for mine, theirs in zip(mixed, alone, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        for stage in ("logprobs", "processed_logprobs"):
            got, want = getattr(mine.outputs[0], stage), getattr(theirs.outputs[0], stage)
            np.testing.assert_allclose(got.logprobs, want.logprobs, atol=5e-5)


def test_raw_stays_raw_and_processed_is_what_was_drawn_from(llm: LLM) -> None:
    bias = {3: 2.0, 8: -4.0}
    params = SamplingParams(
        max_tokens=3, temperature=0.7, logprobs=-1, logprobs_mode="both", logit_bias=bias, seed=4
    )
    out = llm.generate([[5, 6, 7]], params)[0].outputs[0]
    assert out.logprobs is not None
    assert out.processed_logprobs is not None
    scores = SamplingParams(max_tokens=0, prompt_logprobs=-1)
    taught = llm.generate([[5, 6, 7, *out.token_ids]], scores)[0].prompt_logprobs
    assert taught is not None
    for raw, processed, want in zip(out.logprobs, out.processed_logprobs, taught[3:], strict=True):
        ids = range(VOCAB_SIZE)
        row = torch.tensor([raw[token_id].logprob for token_id in ids], dtype=torch.float64)
        np.testing.assert_allclose(row, [want[token_id].logprob for token_id in ids], atol=1e-4)
        for token_id, value in bias.items():
            row[token_id] += value
        expected = torch.log_softmax(row / 0.7, 0)
        np.testing.assert_allclose([processed[token_id].logprob for token_id in ids], expected, atol=1e-4)


def test_a_field_and_its_registered_processor_work_side_by_side(llm: LLM) -> None:
    shown: dict[str, Any] = {"max_tokens": 1, "logprobs": 0, "logprob_token_ids": [3], "explain": True}
    out = llm.generate(
        [[5, 6]],
        SamplingParams(**shown, logit_bias={3: 2.0}, logits_processors_args={"logit_bias": {"3": 1.5}}),
    )[0].outputs[0]
    assert out.explanations is not None
    effects = [(effect.processor, effect.changes.get(3)) for effect in out.explanations[0]]
    assert effects == [
        ("LogitBiasLogitsProcessor", pytest.approx(2.0, abs=1e-5)),
        ("LogitBiasLogitsProcessor", pytest.approx(1.5, abs=1e-5)),
    ]


def test_every_sample_of_a_request_has_a_state_of_its_own(llm: LLM) -> None:
    outs = llm.generate(prompts(3), SamplingParams(n=3, max_tokens=9, seed=1, **FOLLOW))
    for out in outs:
        assert [one.token_ids for one in out.outputs] == [counting(9)] * 3
    assert llm.processors is not None
    kept: Any = llm.processors.registered["FollowLogitsProcessor"]
    assert len(kept.states) <= 9


def test_a_processor_learns_in_the_next_step_that_its_last_request_has_left(llm: LLM) -> None:
    llm.generate([[5, 6]], SamplingParams(max_tokens=3, **FOLLOW))
    llm.generate([[5, 6]], SamplingParams(max_tokens=1))
    assert llm.processors is not None
    kept: Any = llm.processors.registered["FollowLogitsProcessor"]
    assert kept.states == {}
    num_steps = llm.processors.counters["FollowLogitsProcessor"].num_steps
    llm.generate([[5, 6]], SamplingParams(max_tokens=3))
    assert llm.processors.counters["FollowLogitsProcessor"].num_steps == num_steps


def test_samples_differ_where_their_own_draws_differ(llm: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=12, seed=1, frequency_penalty=2.0, repetition_penalty=1.5)
    together = [one.token_ids for one in llm.generate([[5, 6]], params)[0].outputs]
    assert len({tuple(ids) for ids in together}) == 4
    assert [one.token_ids for one in llm.generate([[5, 6]], params)[0].outputs] == together


def test_a_preempted_request_resumes_with_the_right_state(new_llm: Callable[..., LLM]) -> None:
    small = new_llm(FollowLogitsProcessor, kv_cache_memory_bytes=100 * slot_bytes(new_llm))
    asked = [
        SamplingParams(max_tokens=40, frequency_penalty=0.5, seed=index, **(FOLLOW if index % 2 else {}))
        for index in range(6)
    ]
    asked = [SamplingParams(max_tokens=40, ignore_eos=True, frequency_penalty=0.5, seed=1), *asked[1:]]
    outs = small.generate(prompts(6), asked)
    assert small.engine.stats().preempted > 0
    for index, out in enumerate(outs):
        if index % 2:
            assert out.outputs[0].token_ids == counting(40)
        else:
            alone = small.generate([out.prompt_token_ids], asked[index])[0]
            assert out.outputs[0].token_ids == alone.outputs[0].token_ids


def slot_bytes(new_llm: Callable[..., LLM]) -> int:
    engine: Any = new_llm(kv_cache_memory_bytes=1 << 20).engine
    return (1 << 20) // int(engine.capabilities().num_slots)


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_processor_that_raises_fails_its_request_and_the_batch_goes_on(llm: LLM, fail_at: int) -> None:
    bad = SamplingParams(max_tokens=5, logits_processors_args={"follow": True, "fail_at": fail_at})
    good = SamplingParams(max_tokens=5, logprobs=0, logprobs_mode="both", **FOLLOW)
    plain = SamplingParams(max_tokens=5, ignore_eos=True)
    params = [good, good, plain, bad, good, plain, good, good]
    with pytest.raises(BatchError, match="1 of 8 requests failed: request 3: FollowLogitsProcessor failed"):
        llm.generate(prompts(8), params)
    outs = llm.generate(prompts(8), params, on_error="return")
    error = outs[3].error
    assert isinstance(error, ProcessorError)
    assert error.processor == "FollowLogitsProcessor"
    assert isinstance(error.__cause__, RuntimeError)
    assert outs[3].outputs[0].token_ids == counting(fail_at)
    assert outs[3].outputs[0].finish_reason == "error"
    for index in (0, 1, 4, 6, 7):
        assert outs[index].outputs[0].token_ids == counting(5)
    assert [len(outs[index].outputs[0].token_ids) for index in (2, 5)] == [5, 5]
    check_integrity(llm)


def test_a_model_that_gives_nan_is_not_blamed_on_a_processor(llm: LLM, monkeypatch: Any) -> None:
    forward = llm.engine.core.engine.forward  # type: ignore[attr-defined]
    monkeypatch.setattr(forward, "head", lambda hidden: torch.full((len(hidden), VOCAB_SIZE), torch.nan))
    out = llm.generate([[5, 6]], SamplingParams(max_tokens=2, logit_bias={3: 1.0}), on_error="return")[0]
    assert isinstance(out.error, NonFiniteLogitsError)


def test_no_text_ends_before_its_least_length(llm: LLM) -> None:
    eos = SamplingParams(max_tokens=9, min_tokens=4, logit_bias={1: 100.0}, temperature=0)
    out = llm.generate([[5, 6]], eos)[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (5, "stop")
    stop = SamplingParams(
        max_tokens=9, min_tokens=4, logit_bias={40: 100.0}, temperature=0, stop_token_ids=[40]
    )
    out = llm.generate([[5, 6]], stop)[0].outputs[0]
    assert (len(out.token_ids), out.stop_reason) == (5, 40)
    word = SamplingParams(max_tokens=9, min_tokens=4, allowed_token_ids=[70], stop=[token_text(llm, 70)])
    out = llm.generate([[5, 6]], word)[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (4, "stop")


def token_text(llm: LLM, token_id: int) -> str:
    return llm.text.bytes_of([token_id]).decode()


def test_banned_words_do_not_appear(llm: LLM) -> None:
    favoured = dict.fromkeys(llm.text.encode("cat dog", add_special_tokens=False).tolist(), 30.0)
    free = SamplingParams(max_tokens=30, logit_bias=favoured, seed=2)
    assert "dog" in llm.generate([[5, 6]], free)[0].outputs[0].text
    banned = SamplingParams(max_tokens=30, logit_bias=favoured, seed=2, bad_words=["dog"])
    out = llm.generate([[5, 6]], banned)[0].outputs[0]
    assert "dog" not in out.text
    assert len(out.token_ids) == 30


def test_a_banned_word_is_not_said_with_a_space_before_it_either(llm: LLM) -> None:
    alone, spaced = (llm.text.encode(text, add_special_tokens=False).tolist() for text in ("of", " of"))
    assert len(alone) != len(spaced)
    favoured = dict.fromkeys({*alone, *spaced}, 30.0)
    asked = [SamplingParams(max_tokens=60, logit_bias=favoured, seed=seed) for seed in range(4)]
    banned = [replace(params, bad_words=["of"]) for params in asked]
    for forms, params in (((alone, spaced), asked), ((), banned)):
        outs = [out.outputs[0].token_ids for out in llm.generate([[5, 6]] * 4, params)]
        for ids in (alone, spaced):
            is_said = any(ids == out[at : at + len(ids)] for out in outs for at in range(len(out)))
            assert is_said == (ids in forms)


def test_stream_chat_and_whole_give_the_same(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, logprobs=0, logit_bias={9: 3.0}, seed=5, **FOLLOW)
    messages = [{"role": "user", "content": "the cat"}]
    chat = llm.chat(messages, params)[0]
    whole = llm.generate([chat.prompt_token_ids], params)[0]

    async def streamed() -> list[int]:
        request = Request(
            request_id="streamed",
            prompt_token_ids=np.array(chat.prompt_token_ids, dtype=np.int32),
            params=params,
        )
        llm.engine.submit([llm.engine.admit(request)])
        return [out.outputs[0].token_ids async for out in llm.engine.stream("streamed")][-1]

    assert chat.outputs[0].token_ids == whole.outputs[0].token_ids == counting(6)
    assert asyncio.run(streamed()) == counting(6)


def test_a_prompt_that_is_only_scored_is_untouched_by_processors(llm: LLM) -> None:
    scoring: dict[str, Any] = {"max_tokens": 0, "prompt_logprobs": 3}
    plain = llm.generate([[5, 6, 7]], SamplingParams(**scoring))[0]
    biased = llm.generate([[5, 6, 7]], SamplingParams(**scoring, logit_bias={7: 50.0}))[0]
    assert plain.prompt_logprobs == biased.prompt_logprobs


def test_explanations_come_for_every_position_and_only_where_asked(llm: LLM) -> None:
    shown: dict[str, Any] = {"max_tokens": 4, "logprobs": 2, "ignore_eos": True}
    none, empty, full = llm.generate(
        [[5, 6]] * 3,
        [
            SamplingParams(**shown),
            SamplingParams(**shown, explain=True),
            SamplingParams(**shown, explain=True, allowed_token_ids=[50, 51]),
        ],
    )
    assert none.outputs[0].explanations is None
    assert empty.outputs[0].explanations == [[]] * 4
    explanations = full.outputs[0].explanations
    assert explanations is not None
    assert len(explanations) == 4
    for (effect,), row in zip(explanations, full.outputs[0].logprobs or (), strict=True):
        assert effect.processor == "AllowedTokensLogitsProcessor"
        listed = set(row)
        assert effect.changes == dict.fromkeys(sorted(listed - {50, 51}), -math.inf)
        assert 0 < effect.mass_moved <= 1


def test_capture_keeps_every_row_of_a_tagged_request(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=-1, ignore_eos=True)
    tagged = SamplingParams(
        max_tokens=3, temperature=0, logprobs=-1, ignore_eos=True, logits_processors_args={"capture": "mine"}
    )
    _, out = llm.generate([[5, 6]] * 2, [params, tagged])
    assert llm.processors is not None
    capture = llm.processors.registered["CaptureLogitsProcessor"]
    assert isinstance(capture, CaptureLogitsProcessor)
    rows = capture.get_rows("mine")
    assert list(rows) == [0, 1, 2]
    for row, kept in zip(out.outputs[0].logprobs or (), rows.values(), strict=True):
        np.testing.assert_allclose([row[i].logprob for i in range(VOCAB_SIZE)], kept, atol=1e-6)


def test_mixed_processors_and_mixed_counts_share_a_batch(llm: LLM) -> None:
    asked = [
        SamplingParams(max_tokens=8, logprobs=None, seed=1, presence_penalty=1.0),
        SamplingParams(max_tokens=8, logprobs=20, seed=2, logprobs_mode="both", top_k=5, **FOLLOW),
        SamplingParams(max_tokens=8, logprobs=-1, seed=3, logprobs_mode="processed_logprobs", top_p=0.9),
        SamplingParams(max_tokens=8, logprobs=1, seed=4, allowed_token_ids=[60, 61, 62], min_p=0.01),
        SamplingParams(max_tokens=8, seed=5),
    ]
    together = llm.generate(prompts(5), asked)
    for prompt, params, mine in zip(prompts(5), asked, together, strict=True):
        alone = llm.generate([prompt], params)[0].outputs[0]
        assert mine.outputs[0].token_ids == alone.token_ids
        for stage in ("logprobs", "processed_logprobs"):
            got, want = getattr(mine.outputs[0], stage), getattr(alone, stage)
            assert (got is None) == (want is None)
            if want is not None:
                np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)


def test_more_rows_with_processors_than_a_chunk_holds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.core.engine.sampling, "chunk_rows", 2)
    asked = [SamplingParams(max_tokens=4, seed=index, **(FOLLOW if index % 3 else {})) for index in range(8)]
    small = [out.outputs[0].token_ids for out in llm.generate(prompts(8), asked)]
    monkeypatch.undo()
    assert small == [out.outputs[0].token_ids for out in llm.generate(prompts(8), asked)]
    assert [ids for index, ids in enumerate(small) if index % 3] == [counting(4)] * 5


def test_arguments_are_checked_before_anything_starts(llm: LLM) -> None:
    wrong = SamplingParams(logits_processors_args={"follow": True, "logit_bias": {"x": 1}})
    with pytest.raises(ParameterError, match="Expected `int`, got `str`") as raised:
        llm.generate([[5]], wrong)
    assert raised.value.parameter == "logits_processors_args"
    with pytest.raises(ParameterError, match="outside the vocabulary"):
        llm.generate([[5]], SamplingParams(logit_bias={VOCAB_SIZE: 1.0}))


def test_an_unknown_processor_stops_the_start(tiny_model_folder: Path) -> None:
    from logprobe import LLM

    with pytest.raises(ParameterError, match="no processor 'Nothing'"):
        LLM(str(tiny_model_folder), logits_processors=["Nothing"], kv_cache_memory_bytes=1 << 20)


def test_a_request_that_is_given_up_leaves_the_others_right(llm: LLM) -> None:
    async def run() -> list[int]:
        for name in ("gone", "stays"):
            request = Request(
                request_id=name,
                prompt_token_ids=np.array([5, 6], dtype=np.int32),
                params=SamplingParams(max_tokens=30, **FOLLOW),
            )
            llm.engine.submit([llm.engine.admit(request)])
        async for _ in llm.engine.stream("gone"):
            break
        return (await llm.engine.result("stays")).outputs[0].token_ids

    assert asyncio.run(run()) == counting(30)
