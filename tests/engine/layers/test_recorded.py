"""Recorded steps of published weights: which models get them, and their bits are those of the layers' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe.config import EngineConfig
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.layers import recorded as recorded_module
from logprobe.engine.layers.recorded import MOST_ROWS, RecordedSteps, record_steps
from logprobe.engine.plan.scheduler import Span, StepPlan
from logprobe.models import resolve
from placed import Placed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Rotary frequencies of two kinds.
GEMMA3 = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
HALF_ROTATES = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
# Model → what makes it special, and whether its steps are recorded.
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "Llama": ({"attention_bias": True, "mlp_bias": True}, True),
    "Mistral": ({"sliding_window": 9}, True),
    "Qwen2": ({}, True),
    "Qwen3": ({"head_dim": 16}, True),  # norms of the heads
    "Olmo2": ({}, True),  # norms after the parts, and of all heads together
    "SmolLM3": ({"no_rope_layers": [1, 1, 0, 1]}, True),  # a layer without rotation
    "Phi3": ({"rope_parameters": HALF_ROTATES}, True),  # joined projections
    "Granite": ({}, False),  # layers of another form
    "Gemma": ({"head_dim": 12}, True),  # another activation
    "Gemma2": ({"head_dim": 12, "sliding_window": 9}, True),  # four norms
    "Gemma3Text": ({"head_dim": 12, "sliding_window": 9, "layer_types": GEMMA3}, True),
}


@pytest.fixture(scope="module")
def load(small_model: Callable[..., Path]) -> Callable[..., NativeForward]:
    """The forward pass of a small random model of a kind, with published weights unless said otherwise."""

    def make(kind: str, weights: Any = "published") -> NativeForward:
        path = str(small_model(kind, MODELS[kind][0]))
        return NativeForward(EngineConfig(model=path, weights=weights, kv_bytes=1 << 21), resolve(path))

    return make


class Prompts:
    """Sequences in slots of their own, of which a step runs some tokens each."""

    def __init__(self, forward: NativeForward, count: int, length: int = 20) -> None:
        rng = np.random.default_rng(count)
        slots = rng.permutation(forward.num_slots)[: count * length].reshape(count, length).astype(np.int32)
        self.forward, self.slots = forward, slots
        token_ids = rng.integers(2, 280, slots.shape).astype(np.int32)
        self.sequences: list[Any] = [Placed(ids, own) for ids, own in zip(token_ids, slots, strict=True)]

    def step(self, start: int, end: int) -> torch.Tensor:
        """The hidden rows of tokens [start, end) of all sequences."""
        self.forward.run(StepPlan(tokens=[Span(one, start, end) for one in self.sequences]).batch())
        return self.forward.hidden_rows(np.concatenate(self.slots[:, start:end])).clone()


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each recorded step from now on."""
    runs: list[int] = []
    own = RecordedSteps.run

    def run(self: RecordedSteps, token_ids: Any, *rest: Any) -> torch.Tensor:
        runs.append(len(token_ids))
        return own(self, token_ids, *rest)

    monkeypatch.setattr(RecordedSteps, "run", run)
    return runs


@pytest.mark.parametrize("kind", MODELS)
def test_recorded_steps_have_the_bits_of_the_layers_own(
    load: Callable[..., NativeForward], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = load(kind)
    recorded, is_recorded = forward.recorded, MODELS[kind][1]
    assert (recorded is not None) == is_recorded
    runs = count_runs(monkeypatch)
    for count, num_tokens in ((1, 1), (3, 1), (2, 4), (MOST_ROWS, 1), (MOST_ROWS + 1, 1)):
        prompts = Prompts(forward, count)
        prompts.step(0, 15)
        forward.recorded = None
        want = prompts.step(15, 15 + num_tokens)
        forward.recorded = recorded
        runs.clear()
        assert torch.equal(prompts.step(15, 15 + num_tokens), want)
        is_few = count * num_tokens <= MOST_ROWS
        assert runs == ([count * num_tokens] if is_recorded and is_few else [])


def test_a_recorded_step_leaves_the_keys_and_values_that_the_next_needs(
    load: Callable[..., NativeForward],
) -> None:
    forward = load("Llama")
    prompts = Prompts(forward, 2)
    whole = prompts.step(0, 20).view(2, 20, -1)
    prompts.step(0, 10)
    rows = [prompts.step(place, place + 1) for place in range(10, 20)]
    torch.testing.assert_close(torch.stack(rows, dim=1), whole[:, 10:], rtol=0, atol=1e-4)


def test_rows_under_an_adapter_take_the_layers_own_way(
    load: Callable[..., NativeForward], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = load("Llama")
    prompts = Prompts(forward, 2)
    prompts.step(0, 15)
    runs = count_runs(monkeypatch)
    prompts.sequences[1].lora = SimpleNamespace(number=7, parts={})
    prompts.step(15, 16)
    assert runs == []
    prompts.sequences[1].lora = None
    prompts.step(16, 17)
    assert runs == [2]


def test_float32_weights_are_not_recorded(load: Callable[..., NativeForward]) -> None:
    assert load("Llama", "packed").recorded is None


def test_layers_of_several_sizes_are_not_recorded(load: Callable[..., NativeForward]) -> None:
    forward = load("Llama")
    decoder = forward.model.base_model
    assert record_steps(decoder, forward.pool, 128) is not None
    decoder.layers[1].mlp.down_proj.in_features += 1
    assert record_steps(decoder, forward.pool, 128) is None


def test_steps_whose_trial_differs_are_not_recorded(
    load: Callable[..., NativeForward], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = recorded_module.norm_stage
    monkeypatch.setattr(
        recorded_module,
        "norm_stage",
        lambda x, weight, out, epsilon, *rest: own(x, weight, out, epsilon + 1e-2, *rest),
    )
    assert load("Llama").recorded is None
