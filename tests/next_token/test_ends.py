"""Closing an AsyncLM, and invalid settings at its start."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from logprobe.errors import EngineClosedError, ParameterError
from logprobe.testing import holding_steps
from refusals import raises

LIMIT_S = 120  # generous, also for a busy machine
TOLERANCE = 2e-5  # nats, on the tiny model, whose float32 logits reach 20 (rounding: 1e-6 each)


def assert_row(row: Any, want: Any, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(row, want, atol=tolerance, rtol=0)


def test_asking_after_cleanup_is_a_runtime_error_even_for_a_kept_row(new_lm: Any) -> None:
    lm = new_lm()
    lm.next_token_logprobs_sync([5])
    lm.close()
    lm.close()
    with pytest.raises(RuntimeError):
        lm.next_token_logprobs_sync([5])
    with pytest.raises(RuntimeError):
        asyncio.run(lm.next_token_logprobs([5]))
    with pytest.raises(RuntimeError):
        asyncio.run(lm.sample([5], 2, []))


def test_cleanup_ends_every_ask_in_flight(new_lm: Any, random_ids: Any) -> None:
    lm = new_lm()

    async def ask() -> list[Any]:
        tasks = [asyncio.create_task(lm.next_token_logprobs(random_ids(100 + i, 5))) for i in range(30)]
        tasks.append(asyncio.create_task(lm.sample([5], 20, [])))
        await asyncio.to_thread(hold.wait)
        await asyncio.to_thread(lm.close)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT_S)

    with holding_steps(lm) as hold:
        assert {type(end) for end in asyncio.run(ask())} == {EngineClosedError}


def test_an_unbounded_cache_is_refused(new_lm: Any) -> None:
    for bound in (None, -1, float("inf"), True):
        with raises(ParameterError, parameter="cache_bytes"):
            new_lm(cache_bytes=bound)
