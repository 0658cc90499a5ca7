"""Random mixes of processors, with requests arriving and leaving: each gets what it gets alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import SamplingParams
from logprobe.processors import adapt_callable

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from logprobe import LLM


def make_rule(args: Any) -> Any:
    def rule(prompt: list[int], output: list[int], row: torch.Tensor) -> torch.Tensor:
        row[(len(prompt) + len(output)) % len(row)] += args.shift
        return row

    return rule


@pytest.fixture(scope="module")
def llm(new_llm: Callable[..., LLM]) -> LLM:
    shift = adapt_callable(make_rule, name="Shift")
    return new_llm(
        shift,
        "ThinkingBudgetLogitsProcessor",
        "LogitBiasLogitsProcessor",
        max_num_seqs=5,
        kv_cache_memory_bytes=1 << 18,
    )


def some_params(rng: np.random.Generator) -> SamplingParams:
    num_tokens = int(rng.integers(1, 14))
    thinking = {
        "thinking_budget": int(rng.integers(0, 4)),
        "think_start_token_ids": [5],
        "think_end_token_ids": [6, 7],
    }
    options: list[dict[str, Any]] = [
        {"logit_bias": {int(token_id): 4.0 for token_id in rng.integers(2, 288, 3)}},
        {"allowed_token_ids": sorted({1, *rng.integers(2, 288, 40).tolist()})},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
        {"min_tokens": int(rng.integers(0, num_tokens + 1))},
        {"bad_words": ["e", "the", " a"]},
        {"logits_processors_args": {"shift": 9.0}},
        {"logits_processors_args": thinking | {"logit_bias": {"9": 2.0}}},
    ]
    chosen: dict[str, Any] = {}
    for index in rng.choice(len(options), int(rng.integers(0, 4)), replace=False):
        chosen |= options[index]
    return SamplingParams(
        max_tokens=num_tokens,
        temperature=float(rng.choice([0.0, 0.8, 1.5])),
        top_k=int(rng.choice([0, 30])),
        seed=int(rng.integers(1000)),
        logprobs=int(rng.choice([0, 5])),
        logprobs_mode=str(rng.choice(["raw_logprobs", "processed_logprobs", "both"])),  # type: ignore[arg-type]
        explain=bool(rng.integers(2)),
        n=int(rng.integers(1, 3)),
        **chosen,
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_request_in_a_random_mix_gives_what_it_gives_alone(llm: LLM, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Prompts often start with thinking, so that budgets matter.
    prompts = [[*rng.integers(2, 288, int(rng.integers(1, 9))).tolist(), 5] for _ in range(16)]
    asked = [some_params(rng) for _ in prompts]
    together = llm.generate(prompts, asked)
    for prompt, params, mine in zip(prompts, asked, together, strict=True):
        alone = llm.generate([prompt], params)[0]
        for got, want in zip(mine.outputs, alone.outputs, strict=True):
            assert got.token_ids == want.token_ids
            assert got.finish_reason == want.finish_reason
            assert (got.explanations is None) == (want.explanations is None)
            names = [[effect.processor for effect in effects] for effects in want.explanations or ()]
            assert [[effect.processor for effect in effects] for effects in got.explanations or ()] == names
            for stage in ("logprobs", "processed_logprobs"):
                if getattr(want, stage) is not None:
                    pairs = getattr(got, stage).logprobs, getattr(want, stage).logprobs
                    np.testing.assert_allclose(*pairs, atol=1e-4)
