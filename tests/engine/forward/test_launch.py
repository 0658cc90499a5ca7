"""Steps of a few rows as one launch give the same bits as stage by stage."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from decoders import EXPERTS, NATIVE, loaded
from logprobe.engine.forward.cpu.launch import MAX_ROWS, HostOperation, Launches
from logprobe.engine.plan.scheduler import Span, StepPlan
from logprobe.models.lora import LoraWeights
from placed import Placed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe.engine.forward.native import NativeForward


@pytest.fixture(scope="module")
def forward_of(small_model: Callable[..., Path]) -> Callable[[str], NativeForward]:
    """Load the forward pass of a small random model of a kind."""
    return lambda kind: loaded(small_model(kind, (NATIVE | EXPERTS)[kind]))


class Prompts:
    """Sequences in separate slots, of which a step runs some tokens each."""

    def __init__(self, forward: NativeForward, count: int, length: int = 20) -> None:
        rng = np.random.default_rng(count)
        slots = rng.permutation(forward.num_slots)[: count * length].reshape(count, length).astype(np.int32)
        self.forward, self.slots = forward, slots
        token_ids = rng.integers(2, 280, slots.shape).astype(np.int32)
        self.sequences: list[Any] = [Placed(ids, own) for ids, own in zip(token_ids, slots, strict=True)]

    def step(self, start: int, end: int, *, num_first: int | None = None) -> torch.Tensor:
        """Return the hidden rows of tokens [start, end) of all sequences, or of the first ones."""
        spans = [Span(one, start, end) for one in self.sequences[:num_first]]
        self.forward.run(StepPlan(tokens=spans).batch())
        rows = self.forward.hidden_rows(np.concatenate(self.slots[:num_first, start:end]))
        return torch.from_numpy(rows)


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows of each later step that runs as one launch."""
    runs: list[int] = []
    own = Launches.run

    def run(self: Launches, ids: Any, *rest: Any, **options: Any) -> torch.Tensor:
        runs.append(len(ids))
        return own(self, ids, *rest, **options)

    monkeypatch.setattr(Launches, "run", run)
    return runs


@pytest.mark.parametrize("kind", NATIVE)
def test_a_step_as_one_launch_has_the_bits_of_its_stages(
    forward_of: Callable[[str], NativeForward], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = forward_of(kind)
    launches = forward.decoder.launches
    runs = count_runs(monkeypatch)
    for count, num_tokens in ((1, 1), (3, 1), (2, 4), (MAX_ROWS, 1), (MAX_ROWS + 1, 1)):
        prompts = Prompts(forward, count)
        prompts.step(0, 15)
        forward.decoder.launches = None
        want = prompts.step(15, 15 + num_tokens)
        forward.decoder.launches = launches
        runs.clear()
        assert torch.equal(prompts.step(15, 15 + num_tokens), want)
        is_few = count * num_tokens <= MAX_ROWS
        assert runs == ([count * num_tokens] if is_few else [])


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "GPTNeoX", "Cohere2", "Ministral3", *EXPERTS])
def test_rows_have_the_same_bits_whatever_their_number(
    forward_of: Callable[[str], NativeForward], kind: str
) -> None:
    prompts = Prompts(forward_of(kind), 70)
    prompts.step(0, 15)
    whole = prompts.step(15, 16)
    for count in (1, 2, 7, 9, 40):
        assert torch.equal(prompts.step(15, 16, num_first=count), whole[:count])


def test_a_launch_leaves_the_keys_and_values_that_the_next_needs(
    forward_of: Callable[[str], NativeForward],
) -> None:
    prompts = Prompts(forward_of("Llama"), 2)
    whole = prompts.step(0, 20).view(2, 20, -1)
    prompts.step(0, 10)
    rows = [prompts.step(place, place + 1) for place in range(10, 20)]
    torch.testing.assert_close(torch.stack(rows, dim=1), whole[:, 10:], rtol=0, atol=1e-4)


def test_a_step_with_lora_weights_runs_stage_by_stage(
    forward_of: Callable[[str], NativeForward], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = forward_of("Llama")
    prompts = Prompts(forward, 2)
    prompts.step(0, 15)
    runs = count_runs(monkeypatch)
    prompts.sequences[1].lora = lora = LoraWeights("x", "", 7, {})
    forward.make_room(lora)
    prompts.step(15, 16)
    assert runs == []
    prompts.sequences[1].lora = None
    prompts.step(16, 17)
    assert runs == [2]


@pytest.mark.parametrize("kind", ["Llama", *EXPERTS])
def test_the_list_of_operations_is_made_before_any_runs(
    forward_of: Callable[[str], NativeForward], kind: str
) -> None:
    forward = forward_of(kind)
    step = forward.decoder.new_step(3, forward.pool)
    step.hidden.fill(0.5)
    attention = HostOperation(lambda: None)
    operations = forward.decoder.operations(step, lambda *_: attention)
    assert (step.hidden == 0.5).all()
    host = [one for one in operations if isinstance(one, HostOperation) and one is not attention]
    assert bool(host) == (kind in EXPERTS)
    assert operations.count(attention) == len(forward.decoder.layers)


@pytest.mark.parametrize("kind", ["Llama", *EXPERTS])
def test_closing_frees_the_weights_without_the_garbage_collector(
    small_model: Callable[..., Path], kind: str
) -> None:
    forward = loaded(small_model(kind, (NATIVE | EXPERTS)[kind]))
    prompts = Prompts(forward, 2)
    prompts.step(0, 15)
    prompts.step(15, 16)
    decoder = weakref.ref(forward.decoder)
    gc.collect()
    gc.disable()
    try:
        forward.close()
        assert decoder() is None
    finally:
        gc.enable()
