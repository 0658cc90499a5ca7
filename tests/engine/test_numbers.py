"""The engine's numbers against transformers in float32, for every batch, chunking and cache state.

The tests on the real model have counterparts on the tiny model, which need no download.
"""

# ruff: noqa: RUF001 - texts of many scripts are the point

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from logprobe import LLM, SamplingParams
from logprobe.kernels import threads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FROM_TRANSFORMERS = 2e-4  # nats
BETWEEN_BATCHES = 5e-5
BETWEEN_CHUNKS = 1e-4  # maximum over 1,100 positions; 5.5e-5 was observed without AVX-512
CODE = "def gcd(a: int, b: int) -> int:\n    while b:\n        a, b = b, a % b\n    return a\n\n\n"
TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    CODE,
    "从前有座山，山里有座庙，庙里有个老和尚在讲故事。",
    "So happy 😀🎉👩‍👩‍👧‍👦 today!! ❤️🔥",
    "3.14159265358979 2718281828 1,000,000 0x7fff 1e-9",
    "\n\n \t  \n   indented\n\t\tmore   \n ",
    "Привет, мир! Γειά σου Κόσμε! שלום עולם",
    "the the the the the the the the the the the the the the the the",
    '{"name": "Ada", "born": 1815, "tags": ["math", "engine"], "x": null}',
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n4",
]
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)
GREEDY_TOKENS = 24


def chosen(output: Any) -> np.ndarray:
    """Return the chosen tokens' log-probabilities from position 1 on."""
    rows = output.prompt_logprobs
    return np.array(list(rows.logprobs), dtype=np.float64)


class Reference:
    """transformers' results for texts, each computed once for all forms of weights."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._logprobs: dict[tuple[int, ...], np.ndarray] = {}
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Return the log-probabilities of the text's tokens from the second on, float64."""
        key = tuple(ids)
        if key not in self._logprobs:
            logits = self._model(torch.tensor([ids[:-1]])).logits[0]
            lse = torch.logsumexp(logits.double(), dim=-1)
            own = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].double()
            self._logprobs[key] = (own - lse).numpy()
        return self._logprobs[key]

    @torch.no_grad()
    def greedy(self, prompt: list[int]) -> list[int]:
        """Return the greedy tokens."""
        key = tuple(prompt)
        if key not in self._greedy:
            ids = torch.tensor([prompt])
            whole = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY_TOKENS, do_sample=False
            )
            self._greedy[key] = whole[0, len(prompt) :].tolist()
        return self._greedy[key]


def forget(llm: LLM) -> None:
    """Clear the prefix cache."""
    llm.engine.forget_prefixes()


def with_batch_tokens(llm: LLM, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.core.engine.scheduler, "max_num_batched_tokens", count)


def assert_numbers_hold(llm: LLM, ids: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Assert equal results alone and batched, with any chunk size, cold and cached; return those alone."""
    forget(llm)
    alone = [chosen(llm.generate([one], SCORED)[0]) for one in ids]
    forget(llm)
    together = [chosen(output) for output in llm.generate(ids, SCORED)]
    warm = [chosen(output) for output in llm.generate(ids, SCORED)]
    with_batch_tokens(llm, 64, monkeypatch)
    forget(llm)
    in_small_chunks = [chosen(output) for output in llm.generate(ids, SCORED)]
    # Half of each is cached, and the rest is computed.
    forget(llm)
    llm.generate([one[: len(one) // 2] for one in ids], SCORED)
    on_known_halves = [chosen(output) for output in llm.generate(ids, SCORED)]
    for state in (together, warm, in_small_chunks, on_known_halves):
        for got, want in zip(state, alone, strict=True):
            assert np.abs(got - want).max() <= BETWEEN_BATCHES
    return alone


@pytest.fixture(scope="module")
def tiny_reference(tiny_model_folder: Path) -> Reference:
    return Reference(AutoModelForCausalLM.from_pretrained(tiny_model_folder, attn_implementation="eager"))


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    """Let engines started here use two threads, whatever this process's setting."""
    before = threads.num_threads()
    threads.set_num_threads(2)
    yield
    threads.set_num_threads(before)


@pytest.fixture(scope="module", params=["auto", "checkpoint"])
def tiny(request: pytest.FixtureRequest, tiny_model_folder: Path) -> Iterator[LLM]:
    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": 1 << 21,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
    }
    with LLM(str(tiny_model_folder), weights=request.param, **settings) as llm:
        yield llm


@pytest.fixture(scope="module", params=["auto", "checkpoint"])
def real(request: pytest.FixtureRequest, real_llm: LLM) -> Iterator[LLM]:
    """The default model, whose file has 4-bit and 8-bit blocks."""
    if request.param == "auto":
        yield real_llm
    else:
        with LLM(real_llm.config.model, weights=request.param, kv_cache_memory_bytes=1 << 28) as llm:
            yield llm


def test_every_prompt_logprob_of_the_tiny_model_equals_transformers(
    tiny: LLM, tiny_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [tiny.text.encode(text).tolist()[:120] for text in TEXTS]
    alone = assert_numbers_hold(tiny, ids, monkeypatch)
    for one, got in zip(ids, alone, strict=True):
        assert np.abs(got - tiny_reference.logprobs(one)).max() <= FROM_TRANSFORMERS


def test_greedy_output_of_the_tiny_model_equals_transformers_generate(
    tiny: LLM, tiny_reference: Reference
) -> None:
    assert_greedy_equals_generate(tiny, tiny_reference, [text[:40] for text in TEXTS])


def assert_greedy_equals_generate(llm: LLM, reference: Reference, texts: list[str]) -> None:
    asked = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0)
    for output in llm.generate(texts, asked):
        assert output.outputs[0].token_ids == reference.greedy(output.prompt_token_ids)


@pytest.fixture(scope="module")
def real_reference(smollm2_folder: Path) -> Reference:
    kind = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    return Reference(AutoModelForCausalLM.from_pretrained(smollm2_folder, **kind))


@pytest.mark.real_model
def test_every_prompt_logprob_of_the_real_model_equals_transformers(
    real: LLM, real_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [real.text.encode(text).tolist() for text in TEXTS]
    alone = assert_numbers_hold(real, ids, monkeypatch)
    for one, got in zip(ids, alone, strict=True):
        assert np.abs(got - real_reference.logprobs(one)).max() <= FROM_TRANSFORMERS


@pytest.mark.real_model
def test_a_long_text_of_the_real_model_equals_transformers_in_every_state(
    real: LLM, real_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"{CODE.replace('gcd', f'gcd_{index}')}# {TEXTS[index % 5]}\n" for index in range(24))
    # Several whole chunks and a partial one.
    ids = real.text.encode(text).tolist()[:1100]
    assert len(ids) == 1100 > 2 * real.config.scheduler_config.max_num_batched_tokens
    forget(real)
    cold = chosen(real.generate([ids], SCORED)[0])
    assert np.abs(cold - real_reference.logprobs(ids)).max() <= FROM_TRANSFORMERS
    warm = chosen(real.generate([ids], SCORED)[0])
    assert np.abs(warm - cold).max() <= BETWEEN_BATCHES
    with_batch_tokens(real, 64, monkeypatch)
    forget(real)
    in_small_chunks = chosen(real.generate([ids], SCORED)[0])
    assert np.abs(in_small_chunks - cold).max() <= BETWEEN_CHUNKS


@pytest.mark.real_model
def test_greedy_output_of_the_real_model_equals_transformers_generate(
    real: LLM, real_reference: Reference
) -> None:
    assert_greedy_equals_generate(real, real_reference, TEXTS[:5])


@pytest.mark.real_model
def test_the_real_model_runs_in_bfloat16(real_llm: LLM) -> None:
    ids = [real_llm.text.encode(text).tolist() for text in TEXTS]
    with LLM(real_llm.config.model, dtype="bfloat16", kv_cache_memory_bytes=1 << 28) as rough:
        found = [chosen(output) for output in rough.generate(ids, SCORED)]
    wanted = [chosen(output) for output in real_llm.generate(ids, SCORED)]
    assert 0 < np.abs(np.concatenate(found) - np.concatenate(wanted)).mean() < 0.1


@pytest.mark.real_model
def test_a_drawn_tokens_number_is_the_one_it_has_as_a_prompt(real: LLM) -> None:
    asked = SamplingParams(max_tokens=20, seed=3, logprobs=0)
    output = real.generate(TEXTS[0], asked)[0]
    drawn = output.outputs[0]
    forget(real)
    score = real.score([(output.prompt_token_ids, drawn.token_ids)])[0]
    np.testing.assert_allclose(score.token_logprobs, list(drawn.logprobs.logprobs), atol=BETWEEN_BATCHES)
