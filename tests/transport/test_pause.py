"""Paused requests take no steps while others go on; their slots may be reused and are then recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.config import EngineConfig
from logprobe.engine.engine import Engine
from logprobe.engine.output_builder import Describer, OutputBuilder
from logprobe.records import LogprobsInfo
from logprobe.sampling import SamplingParams
from logprobe.transport.messages import Abort, Pause, Request, Resume, Submit

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM


class SmallForward:
    """Wrap a model's forward pass, with fewer KV slots."""

    def __init__(self, forward: Any, num_slots: int) -> None:
        self._forward = forward
        self.num_slots = num_slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)


class Stepped:
    """Drive an engine by hand and check its slots after each step."""

    def __init__(self, llm: Any, num_slots: int, **settings: Any) -> None:
        parts = llm.engine.core.engine
        forward: Any = SmallForward(parts.forward, num_slots)
        config = EngineConfig(**settings)
        self.engine = Engine(config, forward, llm.text, parts.recorder._eos_token_ids)
        self.describer = Describer(
            LogprobsInfo(engine="native"), parts.forward.vocab_size, llm.text.vocabulary
        )
        self.builders: dict[str, OutputBuilder] = {}

    def submit(self, name: str, num_prompt: int = 6, num_tokens: int = 12) -> None:
        request = Request(
            request_id=name,
            prompt_token_ids=np.arange(num_prompt, dtype=np.int32) + 5 + sum(name.encode()) % 97,
            params=SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, logprobs=2),
        )
        self.builders[name] = OutputBuilder(request, self.describer)
        self.take(self.engine.handle(Submit((self.engine.admit(request),))))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.take(self.engine.step())
            self.engine.scheduler.check_integrity()

    def take(self, events: Any) -> None:
        for event in events:
            self.builders[event.request_id].add(event)

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def ids(self, name: str) -> list[int]:
        return self.builders[name].output.outputs[0].token_ids


@pytest.fixture(scope="module")
def tiny_llm(tiny_model_folder: Path) -> LLM:
    """A separate model with its engine thread stopped: engines driven by hand overwrite its slots."""
    from logprobe import LLM

    with LLM(
        str(tiny_model_folder), kv_cache_memory_bytes=1 << 21, max_num_batched_tokens=64, max_num_seqs=8
    ) as llm:
        llm.engine.core.engine.close = lambda: None  # type: ignore[attr-defined]
        return llm


@pytest.fixture(scope="module")
def alone(tiny_llm: LLM) -> dict[str, list[int]]:
    """The tokens of each request when it runs alone."""
    found = {}
    for name in "abc":
        engine = Stepped(tiny_llm, 200)
        engine.submit(name)
        engine.finish()
        found[name] = engine.ids(name)
    return found


def test_a_paused_request_takes_no_step_and_ends_with_the_same_tokens(
    tiny_llm: LLM, alone: dict[str, list[int]]
) -> None:
    engine = Stepped(tiny_llm, 200)
    for name in "ab":
        engine.submit(name)
    engine.step(3)
    engine.engine.handle(Pause("a"))
    held = list(engine.ids("a"))
    engine.finish()
    assert engine.ids("a") == held
    assert engine.ids("b") == alone["b"]
    engine.engine.handle(Resume("a"))
    engine.finish()
    assert engine.ids("a") == alone["a"]


def test_paused_requests_keep_no_place_from_others(tiny_llm: LLM, alone: dict[str, list[int]]) -> None:
    engine = Stepped(tiny_llm, 200, max_num_seqs=1)
    engine.submit("a")
    engine.step(2)
    engine.engine.handle(Pause("a"))
    engine.submit("b")
    engine.finish()
    assert engine.ids("b") == alone["b"]
    engine.submit("c")
    engine.step(1)
    engine.engine.handle(Resume("a"))
    engine.finish()
    assert engine.ids("a") == alone["a"]
    assert engine.ids("c") == alone["c"]


def test_a_full_pool_takes_its_slots_from_paused_requests(tiny_llm: LLM, alone: dict[str, list[int]]) -> None:
    engine = Stepped(tiny_llm, 20)
    engine.submit("a")
    engine.step(8)
    engine.engine.handle(Pause("a"))
    engine.submit("b")
    engine.finish()
    assert engine.ids("b") == alone["b"]
    engine.engine.handle(Resume("a"))
    engine.finish()
    assert engine.ids("a") == alone["a"]
    assert engine.engine.scheduler.num_preempted > 0


def test_a_paused_request_can_be_given_up(tiny_llm: LLM) -> None:
    engine = Stepped(tiny_llm, 50)
    engine.submit("a")
    engine.step(2)
    engine.engine.handle(Pause("a"))
    engine.take(engine.engine.handle(Abort("a")))
    engine.engine.scheduler.check_integrity()
    assert engine.builders["a"].output.outputs[0].finish_reason == "abort"
    assert not engine.engine.has_work
