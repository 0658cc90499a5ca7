"""Whole tiny models with the KV pool: every attention path gives transformers' numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from logprobe.engine.forward.cpu import attention
from logprobe.engine.forward.cpu.attention import is_short

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLERANCE = 1e-4
KINDS = ["llama", "gemma2"]


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(
    kind: str, new_engine: Callable[..., Any], new_window_engine: Callable[..., Any]
) -> Callable[..., Any]:
    return new_engine if kind == "llama" else new_window_engine


@pytest.fixture
def expected(kind: str, tiny_model_folder: Path, tiny_window_folder: Path) -> Callable[..., Any]:
    """Return log-probabilities after each token, by transformers on the whole sequence."""
    folder = tiny_model_folder if kind == "llama" else tiny_window_folder
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    @torch.no_grad()
    def logprobs(ids: list[int]) -> Any:
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()

    return logprobs


def assert_prompt_equals(output: Any, want: Any) -> None:
    ids = output.prompt_token_ids
    got = [next(iter(row.values())).logprob for row in list(output.prompt_logprobs)[1:]]
    np.testing.assert_allclose(
        got, [row[i] for row, i in zip(want[:-1], ids[1:], strict=True)], atol=TOLERANCE
    )


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize(
    "rule",
    [lambda _rows, _context: False, lambda rows, _context: rows <= 3, is_short, lambda _rows, _context: True],
    ids=["chunks", "three", "short", "rows"],
)
@pytest.mark.parametrize("max_num_batched_tokens", [5, 37, 256])
def test_any_split_into_chunks_and_rows_equals_transformers(
    make: Callable[..., Any],
    expected: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    rule: Callable[[int, int], bool],
    max_num_batched_tokens: int,
) -> None:
    monkeypatch.setattr(attention, "is_short", rule)
    engine = make(500, max_num_batched_tokens=max_num_batched_tokens)
    rng = np.random.default_rng(0)
    stem = rng.integers(2, 280, 30).tolist()
    prompts = [[*stem, *rng.integers(2, 280, length).tolist()] for length in (0, 1, 20, 60)]
    asked = {"max_tokens": 6, "temperature": 0.0, "prompt_logprobs": 0, "logprobs": 0, "ignore_eos": True}
    outputs = [engine.submit(f"r{index}", ids, **asked) for index, ids in enumerate(prompts)]
    engine.run()
    for output in outputs:
        assert output.error is None
        tokens = output.outputs[0].token_ids
        want = expected(output.prompt_token_ids + tokens)
        assert_prompt_equals(output, want[: len(output.prompt_token_ids)])
        drawn = want[len(output.prompt_token_ids) - 1 : -1]
        assert tokens == drawn.argmax(-1).tolist()
        np.testing.assert_allclose(list(output.outputs[0].logprobs.logprobs), drawn.max(-1), atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_numbers_after_eviction_and_reuse_equal_transformers(
    make: Callable[..., Any], expected: Callable[..., Any]
) -> None:
    engine = make(110, max_num_batched_tokens=24)
    rng = np.random.default_rng(1)
    stems = [rng.integers(2, 280, 40).tolist() for _ in range(3)]
    for index in range(12):
        ids = [*stems[index % 3], *rng.integers(2, 280, index).tolist()]
        output = engine.submit(f"r{index}", ids, max_tokens=0, prompt_logprobs=0)
        engine.run()
        assert_prompt_equals(output, expected(ids))
    engine.assert_idle()
    assert engine.scheduler.num_cached_tokens > 0
