"""Regression tests for faults of similar samplers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.errors import ParameterError
from logprobe.sampling.params import nth_seed
from refusals import raises

if TYPE_CHECKING:
    from logprobe.next_token import AsyncLM

VLLM = pytest.param("vllm", marks=pytest.mark.vllm)
EVERY = pytest.mark.parametrize("lm", ["near", "far", VLLM], indirect=True)


@EVERY
def test_a_stop_id_that_is_half_a_character_stops_before_it(lm: AsyncLM, random_ids: Any) -> None:
    half = next(token.token_id for token in lm.byte_vocab if bytes(token) == b"\xc3")
    prompt = random_ids(70, 4)
    free = asyncio.run(lm.sample(prompt, 40, [], seed=3))
    stop = free[5]
    assert asyncio.run(lm.sample(prompt, 40, [half, stop], seed=3)) == free[: _first(free, {half, stop})]


def test_sample_without_stop_ids_runs_past_the_models_own_end_of_text(
    lm: AsyncLM, random_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = lm._loaded.engine.core.engine.recorder
    monkeypatch.setattr(recorder, "_eos_token_ids", frozenset(range(lm.vocab_size)))
    samples = asyncio.run(lm.batch_sample([random_ids(71, 4)] * 3, 50, [], seed=0))
    assert [len(sample) for sample in samples] == [50] * 3


@EVERY
def test_the_models_own_end_of_text_ends_a_sample_that_does_not_ignore_it_and_stays(
    lm: AsyncLM, random_ids: Any
) -> None:
    eos, prompts = lm.tokenizer.eos_token_id, [random_ids(seed, 4) for seed in range(200)]
    rows = lm.batch_next_token_logprobs_sync(prompts)
    prompts = [prompts[place] for place in rows[:, eos].argsort()[-24:].tolist()]  # EOS is likely

    def draw(eos_token_ids: list[int], *, ignore_eos: bool) -> Any:
        asked = lm.batch_sample(prompts, 60, eos_token_ids, 2.0, 1, ignore_eos=ignore_eos)
        return asyncio.run(asked)

    free = draw([], ignore_eos=True)
    ends = [_first([*sample, eos], {eos}) for sample in free]
    assert min(ends) < 60
    assert draw([], ignore_eos=False) == [sample[: end + 1] for sample, end in zip(free, ends, strict=True)]
    assert draw([eos], ignore_eos=False) == [sample[:end] for sample, end in zip(free, ends, strict=True)]


@EVERY
def test_sample_at_temperature_0_follows_the_likeliest_token(lm: AsyncLM, random_ids: Any) -> None:
    ids = random_ids(72, 4)
    sampled = asyncio.run(lm.sample(ids, 6, [], temperature=0))
    for token_id in sampled:
        assert lm.next_token_logprobs_sync(ids).argmax() == token_id
        ids = [*ids, token_id]


@EVERY
def test_samples_of_one_prompt_with_one_seed_are_distinct_and_reproducible(
    lm: AsyncLM, random_ids: Any
) -> None:
    prompt = random_ids(73, 4)
    first = asyncio.run(lm.batch_sample([prompt] * 6, 12, [], seed=5))
    assert asyncio.run(lm.batch_sample([prompt] * 6, 12, [], seed=5)) == first
    assert len({tuple(sample) for sample in first}) == 6
    assert asyncio.run(lm.sample(prompt, 12, [], seed=5)) == first[0]
    assert asyncio.run(lm.batch_sample([prompt] * 6, 12, [], seed=6)) != first


def test_seeds_of_repetitions_differ_and_cross_to_any_engine() -> None:
    for seed in (0, -5, 2**63):
        seeds = [nth_seed(seed, repeat) for repeat in range(100)]
        assert seeds[0] == seed
        assert len({*seeds}) == 100
        assert all(0 <= one < 2**64 for one in seeds[1:])


def test_a_single_stop_id_in_place_of_a_list_is_refused(lm: AsyncLM, random_ids: Any) -> None:
    prompt, eos_token_ids = random_ids(76, 4), lm.tokenizer.eos_token_id
    with raises(ParameterError, parameter="eos_token_ids"):
        asyncio.run(lm.sample(prompt, 2, eos_token_ids))
    with raises(ParameterError, parameter="eos_token_ids"):
        asyncio.run(lm.batch_sample([prompt], 2, eos_token_ids))


def _first(token_ids: list[int], stops: set[int]) -> int:
    return next(place for place, token_id in enumerate(token_ids) if token_id in stops)
