"""The example programs with `AsyncLM`: numbers against enumeration, and run from the command line."""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.engine.backends.start import LoadedModel
from logprobe.next_token import AsyncLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe import LLM

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "the cat and"


@pytest.fixture(scope="module")
def lm(tiny_model_folder: Path) -> Iterator[AsyncLM]:
    with AsyncLM.from_name(str(tiny_model_folder), kv_cache_memory_bytes=1 << 22) as lm:
        yield lm


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(request.param)


@pytest.fixture
def run_main(
    example: Any, real_llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Run the program with arguments on the session's model; return its output lines."""
    loaded = LoadedModel(real_llm.engine, real_llm.text)
    monkeypatch.setattr(AsyncLM, "from_name", lambda _: AsyncLM(loaded))

    def run(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [example.__name__, *arguments])
        example.main()
        return capsys.readouterr().out.splitlines()

    return run


def log_normaliser(lm: AsyncLM, prompt_ids: list[int], allowed: Any, num_tokens: int) -> float:
    """Return by enumeration the log-probability that the next tokens (up to the end) are all allowed."""
    row = lm.next_token_logprobs_sync(prompt_ids).astype(float)
    if num_tokens == 1:
        return float(np.logaddexp.reduce(row[allowed]))
    eos = lm.tokenizer.eos_token_id
    ways = [row[eos]]
    ways += [
        row[token_id] + log_normaliser(lm, [*prompt_ids, token_id], allowed, num_tokens - 1)
        for token_id in np.flatnonzero(allowed).tolist()
        if token_id != eos
    ]
    return float(np.logaddexp.reduce(ways))


@pytest.mark.parametrize("example", ["particle_filter"], indirect=True)
def test_the_particles_estimate_the_normaliser_that_enumeration_finds(lm: AsyncLM, example: Any) -> None:
    allowed = example.allowed_tokens(lm, "a")
    prompt_ids = lm.tokenizer.encode(PROMPT)
    particles, estimate = asyncio.run(example.run(lm, prompt_ids, allowed, (3, 1), seed=5))
    assert estimate == pytest.approx(log_normaliser(lm, prompt_ids, allowed, 1), abs=1e-6)  # not random
    particles, estimate = asyncio.run(example.run(lm, prompt_ids, allowed, (600, 2), seed=5))
    exact = log_normaliser(lm, prompt_ids, allowed, 2)
    weights = np.exp([particle.log_weight for particle in particles])
    assert weights.std() > 0
    standard_error = weights.std() / math.sqrt(len(weights)) / weights.mean()
    assert abs(estimate - exact) < 4 * standard_error
    assert standard_error < 0.05
    eos = lm.tokenizer.eos_token_id
    for particle in particles:
        text = b"".join(lm.byte_vocab[i].byte_string for i in particle.token_ids if i != eos)
        assert b"a" not in text.lower()


@pytest.mark.parametrize("example", ["particle_filter"], indirect=True)
def test_resampling_keeps_the_mean_weight_and_drops_the_light(example: Any) -> None:
    weights = [0.0, 0.0, 6.0, -math.inf]
    before = [example.Particle([place], weight) for place, weight in enumerate(weights)]
    after = example.resample(before, np.random.default_rng(0))
    assert len(after) == 4
    assert {one.token_ids[0] for one in after} == {2}
    level = example.log_mean(np.array(weights))
    assert [one.log_weight for one in after] == pytest.approx([level] * 4)
    after[0].token_ids.append(9)
    assert after[1].token_ids == [2]
    even = [example.Particle([0]), example.Particle([1])]
    assert example.resample(even, np.random.default_rng(0)) is even


@pytest.mark.parametrize("example", ["trie"], indirect=True)
def test_a_word_is_its_tokens_and_what_may_follow_it(lm: AsyncLM, example: Any) -> None:
    words = ["cat", "cats", "the", "dog", "o"]
    scored = asyncio.run(example.score_words(lm, PROMPT, words))
    assert sorted(one.word for one in scored) == sorted(words)
    assert [one.logprob for one in scored] == sorted((one.logprob for one in scored), reverse=True)
    prompt_ids = lm.tokenizer.encode(PROMPT)
    for one in scored:
        ids = lm.tokenizer.encode(f" {one.word}", add_special_tokens=False)
        spelled = sum(
            float(lm.next_token_logprobs_sync(prompt_ids + ids[:at])[ids[at]]) for at in range(len(ids))
        )
        assert one.num_tokens == len(ids)
        assert one.spelled == pytest.approx(spelled, abs=1e-5)
        after = np.exp(lm.next_token_logprobs_sync(prompt_ids + ids).astype(float))
        goes_on = [
            i
            for i, token in enumerate(lm.byte_vocab)
            if i not in lm.tokenizer.all_special_ids
            and (token[:1].isalnum() or token[0] in {*b"'"} or token[0] > 127)
        ]
        assert one.ended == pytest.approx(math.log(1 - after[goes_on].sum()), abs=1e-4)


@pytest.mark.real_model
@pytest.mark.parametrize("example", ["particle_filter"], indirect=True)
def test_the_particle_filter_runs_by_hand(run_main: Callable[..., list[str]]) -> None:
    *lines, last = run_main("--particles", "4", "--tokens", "5", "--seed", "1")
    weights = [float(line.split()[0]) for line in lines]
    assert len(lines) == 4
    assert sum(weights) == pytest.approx(1, abs=1e-3)
    assert weights == sorted(weights, reverse=True)
    assert not any("e" in line.lower() for line in lines)
    assert -10 < float(last.split()[2]) < 0


@pytest.mark.real_model
@pytest.mark.parametrize("example", ["trie"], indirect=True)
def test_the_trie_runs_by_hand_and_knows_the_sky(run_main: Callable[..., list[str]], real_llm: LLM) -> None:
    asked = [("The sky is", " blue"), ("The sky is", " dog")]
    known = dict(zip(("blue", "dog"), real_llm.score(asked), strict=True))
    head, *lines = run_main("--prompt", "The sky is", "dog", "blue")
    assert head.split() == ["word", "tokens", "spelled", "ended", "logprob", "(nats)"]
    assert [line.split()[0] for line in lines] == ["blue", "dog"]
    for word, _, spelled, ended, logprob in map(str.split, lines):
        assert float(spelled) == pytest.approx(known[word].logprob, abs=2e-3)
        assert float(logprob) == pytest.approx(float(spelled) + float(ended), abs=2e-4)
