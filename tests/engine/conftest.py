"""An engine stepped by hand without its thread, over a tiny model shared by all tests of a session."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.config import EngineConfig
from logprobe.engine.engine import Engine
from logprobe.engine.output_builder import Describer, OutputBuilder
from logprobe.kernels.placement import copied
from logprobe.records import LogprobsInfo
from logprobe.sampling import SamplingParams
from logprobe.transport.messages import Abort, Request, Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from logprobe.engine.protocol import StepBatch
    from logprobe.engine.request import RequestOutput
    from logprobe.transport.messages import Event

TOLERANCE = 1e-4  # nats, on the tiny models
MAX_STEPS = 5000  # of a test
SMALL: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


class WatchedForward:
    """A forward backend with a smaller pool that counts tokens and lets a test make a step fail."""

    def __init__(self, forward: Any, num_slots: int) -> None:
        self._forward = forward
        self.num_slots = num_slots
        self.num_tokens_run = 0
        self.before_run: Callable[[StepBatch], None] = lambda _: None
        self.spoil: Callable[[Any, Any], None] = lambda _slots, _rows: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def run(self, batch: StepBatch) -> None:
        self.before_run(batch)
        self.num_tokens_run += len(batch.token_ids)
        self._forward.run(batch)

    def close(self) -> None:
        """Do nothing, as others use the same model."""

    def hidden_rows(self, slots: Any) -> Any:
        rows = copied(self._forward.hidden_rows(slots))
        self.spoil(slots, rows)
        return rows


class SteppedEngine:
    """Submit requests and run steps by hand; each step is followed by a check of all slots' owners.

    All instances share one KV pool: run the next engine only when the last one is finished.
    """

    def __init__(self, llm: Any, num_slots: int, **settings: Any) -> None:
        parts = llm.engine.core.engine
        self.text = llm.text
        self.forward = WatchedForward(parts.forward, num_slots)
        config = EngineConfig(**settings)
        self.engine = Engine(config, self.forward, llm.text, parts.recorder._eos_token_ids)
        self.describer = Describer(
            LogprobsInfo(engine="native"), self.forward.vocab_size, llm.text.vocabulary
        )
        self.builders: dict[str, OutputBuilder] = {}
        self.num_ends: dict[str, int] = {}
        self.num_steps = 0

    @property
    def scheduler(self) -> Any:
        return self.engine.scheduler

    @property
    def outputs(self) -> dict[str, RequestOutput]:
        return {name: builder.output for name, builder in self.builders.items()}

    def submit(
        self, name: str, ids: Iterable[int], *, call: str = "", caller: str = "", **params: Any
    ) -> RequestOutput:
        request = Request(
            request_id=name,
            prompt_token_ids=np.array(list(ids), dtype=np.int32),
            params=SamplingParams(**params),
            call=call,
            caller=caller,
        )
        admitted = self.engine.admit(request)
        self.builders[name] = OutputBuilder(request, self.describer)
        self.num_ends[name] = 0
        self.take(self.engine.handle(Submit((admitted,))))
        self.scheduler.check_integrity()
        return self.builders[name].output

    def abort(self, name: str) -> None:
        self.take(self.engine.handle(Abort(name)))
        self.scheduler.check_integrity()

    def step(self) -> None:
        assert self.num_steps < MAX_STEPS, "the engine makes no progress"
        self.take(self.engine.step())
        self.num_steps += 1
        self.scheduler.check_integrity()

    def take(self, events: Iterable[Event]) -> None:
        """Add new events, and count how often each request ends."""
        for event in events:
            builder = self.builders[event.request_id]
            was_finished = builder.output.is_finished
            builder.add(event)
            self.num_ends[event.request_id] += builder.output.is_finished and not was_finished

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def assert_idle(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.running
        assert not scheduler.waiting
        assert scheduler.num_available == scheduler.pool.num_slots
        assert set(self.num_ends.values()) <= {1}


def start(folder: Path) -> Any:
    """Load a model and stop its thread; its parts serve engines driven by hand."""
    from logprobe import LLM

    with LLM(str(folder), kv_cache_memory_bytes=1 << 20) as llm:
        llm.engine.core.engine.close = lambda: None  # type: ignore[attr-defined]
        return llm


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Callable[..., Path]:
    """Save a small random model of a transformers class, with special settings."""

    def make(kind: str, special: dict[str, Any], prepare: Callable[[Any], None] = lambda _: None) -> Path:
        import torch
        import transformers

        path = tmp_path_factory.mktemp(kind)
        torch.manual_seed(3)
        config = getattr(transformers, f"{kind}Config")(**SMALL, **special)
        model = transformers.AutoModelForCausalLM.from_config(config)
        prepare(model)
        model.save_pretrained(path)
        for file in tiny_model_folder.glob("tokenizer*"):
            shutil.copy(file, path)
        return path

    return make


@pytest.fixture(scope="session")
def parts(tiny_model_folder: Path) -> Any:
    return start(tiny_model_folder)


@pytest.fixture(scope="session")
def window_parts(tiny_window_folder: Path) -> Any:
    return start(tiny_window_folder)


@pytest.fixture(scope="session")
def new_engine(parts: Any) -> Callable[..., SteppedEngine]:
    """Make an engine with empty caches on the tiny Llama: number of slots, settings of `EngineConfig`."""
    return lambda num_slots=400, **settings: SteppedEngine(parts, num_slots, **settings)


@pytest.fixture(scope="session")
def new_window_engine(window_parts: Any) -> Callable[..., SteppedEngine]:
    """The same on the tiny Gemma 2."""
    return lambda num_slots=400, **settings: SteppedEngine(window_parts, num_slots, **settings)


@pytest.fixture(scope="session")
def assert_same() -> Callable[[RequestOutput, RequestOutput], None]:
    """Compare two outputs: equal tokens, numbers within the tolerance."""
    return _assert_same


def _assert_same(got: RequestOutput, want: RequestOutput) -> None:
    _assert_same_rows(got.prompt_logprobs, want.prompt_logprobs)
    for mine, theirs in zip(got.outputs, want.outputs, strict=True):
        assert repr(mine.error) == repr(theirs.error)
        for name in ("token_ids", "finish_reason", "stop_reason", "num_text_bytes"):
            assert getattr(mine, name) == getattr(theirs, name), name
        _assert_same_rows(mine.logprobs, theirs.logprobs)
        _assert_same_rows(mine.processed_logprobs, theirs.processed_logprobs)
        if theirs.cumulative_logprob is None:
            assert mine.cumulative_logprob is None
        else:
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=10 * TOLERANCE)


def _assert_same_rows(got: Any, want: Any) -> None:
    if want is None:
        assert got is None
        return
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert len(mine) == len(theirs)
        assert next(iter(mine), None) == next(iter(theirs), None), "the chosen token comes first"
        np.testing.assert_allclose(_sorted_logprobs(mine), _sorted_logprobs(theirs), atol=TOLERANCE)
        for token_id in mine.keys() & theirs.keys():
            assert mine[token_id].logprob == pytest.approx(theirs[token_id].logprob, abs=TOLERANCE)
            # Two logits within the tolerance may swap ranks.
            assert abs(mine[token_id].rank - theirs[token_id].rank) <= 1
    assert got.extras.keys() == want.extras.keys(), "a further column is there if and only if it was asked"
    for name, column in want.extras.items():
        np.testing.assert_allclose(got.extras[name], column, atol=10 * TOLERANCE)
    assert (got.given is None) == (want.given is None), "named ids are there if and only if they were asked"
    if want.given is not None:
        _assert_same_rows(got.given, want.given)


def _sorted_logprobs(row: dict[int, Any]) -> list[float]:
    return sorted(entry.logprob for entry in row.values())
