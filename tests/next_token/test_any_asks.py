"""Any asks, in any order, at once or not, given up or not: each row is its prefix's own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe import AsyncLM

TOLERANCE = 2e-5
# Few ids and short prefixes, so that many asks share some or all of their tokens.
PREFIX = st.lists(st.integers(2, 4), min_size=1, max_size=6)
ASK = st.tuples(PREFIX, st.booleans(), st.sampled_from([0, 0, 0, 1, 3]))  # prefix, given up, pause (ms)


@pytest.fixture(scope="module", params=[0, 3000, 1 << 20])
def bounded_lm(request: Any, new_lm: Any) -> Iterator[AsyncLM]:
    """One that keeps no row, two rows, or all; three at a time run, 16 tokens a step, 48 slots."""
    with new_lm(cache_bytes=request.param, max_batch_rows=3, max_batch_tokens=16, kv_bytes=48 * 1300) as lm:
        yield lm


@pytest.fixture(scope="module")
def known_rows(plain_row: Any) -> Any:
    known: dict[tuple[int, ...], Any] = {}

    def row(ids: list[int]) -> Any:
        if tuple(ids) not in known:
            known[tuple(ids)] = plain_row(ids)
        return known[tuple(ids)]

    return row


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asks=st.lists(ASK, min_size=1, max_size=14), forgets=st.booleans())
def test_every_ask_ends_in_its_own_row(
    bounded_lm: AsyncLM, known_rows: Any, asks: list[tuple[list[int], bool, int]], forgets: bool
) -> None:
    lm = bounded_lm
    if forgets:
        lm.clear_kv_cache()

    async def run() -> list[Any]:
        tasks = []
        for ids, is_given_up, pause_ms in asks:
            tasks.append(asyncio.create_task(lm.next_token_logprobs(ids)))
            await asyncio.sleep(pause_ms / 1000)
            if is_given_up:
                tasks[-1].cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    ends = asyncio.run(run())
    shared: dict[int, tuple[int, ...]] = {}
    for (ids, is_given_up, _), end in zip(asks, ends, strict=True):
        if isinstance(end, BaseException):
            assert is_given_up
            assert isinstance(end, asyncio.CancelledError)
            continue
        np.testing.assert_allclose(end, known_rows(ids), atol=TOLERANCE, rtol=0)
        assert shared.setdefault(end.__array_interface__["data"][0], tuple(ids)) == tuple(ids)
    assert lm._cache.num_bytes <= lm._cache.max_bytes
    assert lm._cache.num_bytes == sum(row.nbytes + len(key[1]) for key, row in lm._cache._rows.items())


def test_afterwards_every_slot_has_one_owner_and_nothing_is_in_flight(bounded_lm: AsyncLM) -> None:
    bounded_lm.next_token_logprobs_sync([5])
    assert bounded_lm._desk._in_flight == {}
    assert not bounded_lm._engine._outputs  # type: ignore[attr-defined]
    bounded_lm._engine._engine.scheduler.check_integrity()  # type: ignore[attr-defined]
