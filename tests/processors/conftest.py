"""Rows, batches and model facts without a model, and tiny models with processors."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.config import EngineConfig
from logprobe.processors import BatchRow, BatchState, LogitsProcessor, ModelFacts
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from logprobe import LLM

    Floats = NDArray[np.float32]

VOCAB_SIZE = 10


class Letters:
    """A tokenizer for ten letters: a = 0 … j = 9."""

    eos_token_id = 9
    special_token_ids = frozenset({9})
    tokenizer: Any = None

    @property
    def vocabulary(self) -> Letters:
        return self

    def plain_ids(self, text: str) -> list[int]:
        return ["abcdefghij".index(letter) for letter in text if letter in "abcdefghij"]

    def token_bytes(self, token_id: int) -> bytes:
        return b"abcdefghij"[token_id : token_id + 1]

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode()


@pytest.fixture
def facts() -> ModelFacts:
    return ModelFacts(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({9}), text=Letters())


@pytest.fixture
def make(facts: ModelFacts) -> Callable[[type[LogitsProcessor]], Any]:
    """Make a processor like the engine does."""

    def make_one(kind: type[LogitsProcessor]) -> Any:
        processor = kind(EngineConfig())
        processor.bind(facts)
        return processor

    return make_one


@pytest.fixture
def row() -> Callable[..., BatchRow]:
    """Make a row: request id, arguments, prompt tokens, generated tokens."""

    def make_row(name: str, args: Any = None, prompt: Any = (), output: Any = (), **more: Any) -> BatchRow:
        ids = output if isinstance(output, list) else list(output)
        params = more.pop("params", SamplingParams())
        return BatchRow(
            request_id=name, args=args, prompt_token_ids=prompt, output_token_ids=ids, params=params, **more
        )

    return make_row


@pytest.fixture
def run() -> Callable[..., Floats]:
    """Update a processor with rows and apply it to fixed logits; tensors and a second run give the same."""
    previous: dict[int, tuple[BatchRow, ...]] = {}

    def run_once(processor: Any, rows: list[BatchRow], logits: Floats | None = None) -> Floats:
        batch = BatchState(rows, previous.get(id(processor), ()))
        previous[id(processor)] = batch.rows
        processor.update_state(batch)
        logits = fixed_logits(len(rows)) if logits is None else logits
        first: Floats = processor.apply(logits.copy())
        np.testing.assert_array_equal(first, processor.apply(logits.copy()))
        if find_spec("torch") is not None:  # tensors, as on a GPU
            import torch

            tensor = processor.apply(torch.from_numpy(logits.copy()))
            assert isinstance(tensor, torch.Tensor)
            np.testing.assert_array_equal(first, tensor)
        return first

    return run_once


def fixed_logits(num_rows: int, width: int = VOCAB_SIZE) -> Floats:
    return np.random.default_rng(num_rows).standard_normal((num_rows, width), np.float32)


@pytest.fixture
def logits() -> Callable[..., Floats]:
    return fixed_logits


@pytest.fixture(scope="session")
def new_llm(tiny_model_folder: Path) -> Iterator[Callable[..., LLM]]:
    """Start the tiny Llama with processors; all are closed at the end of the session."""
    from logprobe import LLM

    started: list[LLM] = []

    def start(*processors: str | type, **settings: Any) -> LLM:
        settings = {
            "kv_cache_memory_bytes": 1 << 21,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 16,
        } | settings
        started.append(LLM(str(tiny_model_folder), logits_processors=list(processors), **settings))
        return started[-1]

    yield start
    for llm in started:
        llm.close()
