"""Whole rows captured in vLLM's worker and fetched by one call, against vLLM's own rows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.engine.request import Requests
from logprobe.errors import EngineError
from logprobe.integrations.vllm import start
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from logprobe.engine.backends.start import LoadedModel

pytestmark = pytest.mark.vllm
TO_ROUNDING = 1e-5  # nats: one normaliser is summed in float64, the other in float32
TO_NATIVE = 5e-3
LIMIT_S = 120


def prompts(count: int, longest: int) -> list[Any]:
    chance = np.random.default_rng(count)
    return [chance.integers(2, 250, chance.integers(1, longest)).astype(np.int32) for _ in range(count)]


async def rows_of(engine: Any, asked: list[Any]) -> list[Any]:
    admitted = [Requests(engine).admit(ids, SamplingParams(max_tokens=1), wants_row=True) for ids in asked]
    engine.submit(admitted)
    waits = [engine.result(one.request.request_id) for one in admitted]
    outputs = await asyncio.wait_for(asyncio.gather(*waits), LIMIT_S)
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].row for output in outputs]


async def own_rows_of(engine: Any, asked: list[Any]) -> list[Any]:
    vocab_size = engine.capabilities().vocab_size
    return [await start.own_row(engine.core._llm, ids, vocab_size) for ids in asked]


def test_captured_rows_are_vllms_own(on_vllm: LoadedModel) -> None:
    """More prompts than batch rows, of very different lengths, some longer than a step."""
    engine: Any = on_vllm.engine
    asked = prompts(24, 90)
    captured = asyncio.run(rows_of(engine, asked))
    own = engine.core._bridge.run(own_rows_of(engine, asked))
    for mine, theirs in zip(captured, own, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=TO_ROUNDING, rtol=0)
        assert np.exp(mine.astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)


def test_they_are_the_native_engines(on_vllm: LoadedModel, native: LoadedModel) -> None:
    asked = prompts(12, 60)
    got, want = (asyncio.run(rows_of(one.engine, asked)) for one in (on_vllm, native))
    np.testing.assert_allclose(got, want, atol=TO_NATIVE, rtol=0)


def test_a_row_stays_the_same_beside_others_and_from_the_cache(on_vllm: LoadedModel) -> None:
    engine = on_vllm.engine
    [first, *others] = prompts(9, 70)
    engine.forget_prefixes()
    [cold] = asyncio.run(rows_of(engine, [first]))
    [again, *_] = asyncio.run(rows_of(engine, [first, *others]))
    np.testing.assert_allclose(again, cold, atol=5e-5, rtol=0)


def test_rows_that_end_together_are_fetched_together(on_vllm: LoadedModel) -> None:
    engine: Any = on_vllm.engine
    asked = [np.array([5 + place, 9], dtype=np.int32) for place in range(8)]
    before = engine.core._fetcher.num_calls
    asyncio.run(rows_of(engine, asked))
    assert engine.core._fetcher.num_calls - before <= 4, "a call for a step, not for a row"


def test_rows_that_are_not_vllms_own_are_told_at_the_start(
    on_vllm: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = on_vllm.engine
    assert start.check_routes(engine, engine.core._llm, engine.core._bridge) < TO_ROUNDING

    own = start.own_row
    monkeypatch.setattr(start, "own_row", lambda *args: _reversed(own(*args)))
    with pytest.raises(EngineError, match="differ by"):
        start.check_routes(engine, engine.core._llm, engine.core._bridge)


async def _reversed(row: Any) -> Any:
    return (await row)[::-1]
