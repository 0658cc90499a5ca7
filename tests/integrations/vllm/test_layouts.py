"""Several workers, the second model runner, and an engine that dies."""

from __future__ import annotations

import asyncio
import math
import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from logprobe.engine.backends.start import start_engine
from logprobe.engine.request import Requests
from logprobe.errors import EngineError
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from logprobe.config import EngineConfig
    from logprobe.engine.backends.start import LoadedModel

pytestmark = pytest.mark.vllm
LIMIT_S = 120
BETWEEN_LAYOUTS = 1e-3  # nats


async def answers(engine: Any) -> tuple[Any, Any]:
    """Return whole rows for prompts of many lengths, and a sampled text with its numbers."""
    chance = np.random.default_rng(0)
    asked = [chance.integers(2, 250, length).astype(np.int32) for length in (1, 2, 7, 31, 33, 70)]
    maker = Requests(engine)
    admitted = [maker.admit(ids, SamplingParams(max_tokens=1), wants_row=True) for ids in asked]
    drawn = SamplingParams(
        max_tokens=12, temperature=1.0, seed=2, logprobs=3, prompt_logprobs=1, min_tokens=4
    )
    admitted.append(maker.admit(asked[3], drawn))
    engine.submit(admitted)
    waits = [engine.result(one.request.request_id) for one in admitted]
    *rows, text = await asyncio.wait_for(asyncio.gather(*waits), LIMIT_S)
    assert text.error is None
    return np.stack([one.outputs[0].row for one in rows]), text


def test_two_tensor_parallel_workers_give_the_rows_of_one(
    on_vllm: LoadedModel, vllm_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if (os.cpu_count() or 1) > 1 else "0|0")
    options = {**(vllm_config.engine_options or {}), "tensor_parallel_size": 2}  # type: ignore[dict-item]
    want, text = asyncio.run(answers(on_vllm.engine))
    loaded = start_engine(replace(vllm_config, engine_options=options))
    try:
        got, other = asyncio.run(answers(loaded.engine))
    finally:
        loaded.engine.close()
    np.testing.assert_allclose(got, want, atol=BETWEEN_LAYOUTS, rtol=0)
    assert other.outputs[0].token_ids == text.outputs[0].token_ids
    for mine, theirs in zip(other.outputs[0].logprobs, text.outputs[0].logprobs, strict=True):
        for key, one in mine.items():
            assert one.logprob == pytest.approx(theirs[key].logprob, abs=BETWEEN_LAYOUTS)


def test_an_engine_that_dies_ends_its_requests_by_name(vllm_config: EngineConfig) -> None:
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    loaded = start_engine(vllm_config)
    engine = loaded.engine
    try:

        async def run() -> list[Any]:
            asked = SamplingParams(max_tokens=100, ignore_eos=True, logprobs=1)
            maker = Requests(engine)
            admitted = [maker.admit(np.array([5 + i], np.int32), asked) for i in range(6)]
            engine.submit(admitted)
            waits = [engine.result(one.request.request_id) for one in admitted]
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if child.pid not in others:
                        child.kill()
            return await asyncio.wait_for(asyncio.gather(*waits), LIMIT_S)

        for output in asyncio.run(run()):
            assert isinstance(output.error, EngineError)
        assert engine.stalled_s() == math.inf
        assert not engine.is_busy
    finally:
        engine.close()


class TestTheSecondRunner:
    """Tests its interface with a fake, as it runs on GPUs."""

    def test_rows_are_found_by_slot_and_a_partial_prompt_draws_nothing(self) -> None:
        import torch
        from vllm import SamplingParams as VllmParams

        from logprobe.integrations.vllm import worker
        from logprobe.integrations.vllm.orders import TAG, WORK

        class Spy:
            def __init__(self) -> None:
                self.drawn: list[dict[int, int]] = []

            def open(self, tag: str, _: bytes) -> Any:
                from types import SimpleNamespace

                return SimpleNamespace(tag=tag, sample=SimpleNamespace(num_prompt=3))

            def draw(self, _: Any, rows: Any) -> None:
                self.drawn.append({row: (run.tag, count) for row, (run, count) in rows.items()})

        processor: Any = object.__new__(worker.LogprobeLogitsProcessor)
        processor._rows, processor._slots, processor._draw = {}, {}, Spy()
        ours = VllmParams(extra_args={TAG: "a", WORK: b""})
        assert processor.add_request(4, ours)
        assert not processor.add_request(2, VllmParams())

        class Context:
            idx_mapping_np = np.array([2, 4])
            seq_lens_upper_bound_np = np.array([9, 2])

        logits = torch.zeros(2, 8)
        processor.apply(logits, Context())
        Context.seq_lens_upper_bound_np = np.array([10, 5])
        processor.apply(logits, Context())
        assert not processor.add_request(4, VllmParams())  # the slot has been reassigned
        processor.apply(logits, Context())
        assert processor._draw.drawn == [{1: ("a", 2)}]
