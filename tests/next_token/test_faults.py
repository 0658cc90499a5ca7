"""Regression tests for faults of similar libraries."""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe.errors import EngineClosedError, ForwardError
from logprobe.testing import StepHold, check_integrity, failing_steps, open_requests

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.next_token import AsyncLM

LIMIT_S = 120  # generous, also for a busy machine
MAX_ASKS = 2000  # of a slow stream of requests: more than half a minute
TOLERANCE = 2e-5  # nats, on the tiny model, whose float32 logits reach 20 (rounding: 1e-6 each)
ON_VLLM = 2e-4  # nats: vLLM's layers round differently
BOTH = pytest.mark.parametrize("lm", ["near", "far"], indirect=True)
VLLM = pytest.param("vllm", marks=pytest.mark.vllm)
NEAR_AND_VLLM = pytest.mark.parametrize("lm", ["near", VLLM], indirect=True)
EVERY = pytest.mark.parametrize("lm", ["near", "far", VLLM], indirect=True)


def assert_row(row: Any, want: Any) -> None:
    tolerance = ON_VLLM if isinstance(row, torch.Tensor) else TOLERANCE
    np.testing.assert_allclose(row, want, atol=tolerance, rtol=0)


@EVERY
def test_prefixes_that_differ_only_in_their_cached_part_keep_their_own_rows(
    lm: AsyncLM, plain_row: Any, random_ids: Any
) -> None:
    left, right, suffix = random_ids(1, 12), random_ids(2, 12), random_ids(3, 4)

    async def ask() -> Any:
        await asyncio.gather(lm.next_token_logprobs(left), lm.next_token_logprobs(right))
        return await asyncio.gather(
            lm.next_token_logprobs(left + suffix), lm.next_token_logprobs(right + suffix)
        )

    rows = asyncio.run(ask())
    assert_row(rows[0], plain_row(left + suffix))
    assert_row(rows[1], plain_row(right + suffix))
    assert np.abs(np.asarray(rows[0]) - np.asarray(rows[1])).max() > 0.1


@EVERY
def test_sync_after_a_cached_prefix_two_tokens_shorter(lm: AsyncLM, plain_row: Any, random_ids: Any) -> None:
    ids = random_ids(4, 14)
    lm.next_token_logprobs_sync(ids[:12])
    assert_row(lm.next_token_logprobs_sync(ids), plain_row(ids))


@EVERY
def test_a_cached_prefix_used_twice_and_by_two_siblings_at_once(
    lm: AsyncLM, plain_row: Any, random_ids: Any
) -> None:
    stem = random_ids(5, 10)
    asked = [[*stem, 7], [*stem, 8], [*stem, 7, 9], [*stem, 8, 9]]
    lm.next_token_logprobs_sync(stem)
    for ids in asked[:2]:
        assert_row(lm.next_token_logprobs_sync(ids), plain_row(ids))
    lm.clear_cache()
    rows = asyncio.run(lm.batch_next_token_logprobs(asked))
    for ids, row in zip(asked, rows, strict=True):
        assert_row(row, plain_row(ids))


@EVERY
def test_one_cancelled_waiter_of_eight_leaves_the_seven_alone(
    lm: AsyncLM, plain_row: Any, random_ids: Any
) -> None:
    ids = random_ids(6, 9)
    asked = [ids] * 4 + [random_ids(60 + place, 9) for place in range(4)]

    async def ask() -> list[Any]:
        tasks = [asyncio.create_task(lm.next_token_logprobs(one)) for one in asked]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT_S)

    rows = asyncio.run(ask())
    assert isinstance(rows[1], asyncio.CancelledError)
    for place in (0, 2, 3, 4, 5, 6, 7):
        assert_row(rows[place], plain_row(asked[place]))


def test_a_waiter_that_times_out_is_cancelled_alone(
    lm: AsyncLM, plain_row: Any, random_ids: Any, held: StepHold
) -> None:
    ids = random_ids(7, 9)

    async def ask() -> Any:
        patient = asyncio.create_task(lm.next_token_logprobs(ids))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lm.next_token_logprobs(ids), 0.05)
        held.release()
        return await asyncio.wait_for(patient, LIMIT_S)

    assert_row(asyncio.run(ask()), plain_row(ids))


def test_a_row_that_nobody_waits_for_any_more_is_given_up(
    lm: AsyncLM, random_ids: Any, held: StepHold
) -> None:
    async def ask() -> None:
        tasks = [asyncio.create_task(lm.next_token_logprobs(random_ids(8, 9))) for _ in range(3)]
        await asyncio.to_thread(held.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        held.release()

    asyncio.run(ask())
    lm.next_token_logprobs_sync(random_ids(9, 3))
    assert lm._batcher._in_flight == {}
    assert open_requests(lm) == []


def test_a_forward_pass_that_raises_fails_its_asks_and_the_next_ask_works(
    lm: AsyncLM, plain_row: Any, random_ids: Any
) -> None:
    async def ask() -> list[Any]:
        asked = (lm.next_token_logprobs(random_ids(10 + place, 6)) for place in range(5))
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), LIMIT_S)

    with failing_steps(lm, MemoryError("no room")):
        errors = asyncio.run(ask())
    assert [type(error) for error in errors] == [ForwardError] * 5
    assert "no room" in str(errors[0])
    for place, row in enumerate(asyncio.run(ask())):
        assert_row(row, plain_row(random_ids(10 + place, 6)))
    check_integrity(lm)


@EVERY
def test_one_id_out_of_range_fails_alone_of_eight(lm: AsyncLM, plain_row: Any, random_ids: Any) -> None:
    asked = [random_ids(20 + place, 6) for place in range(8)]
    asked[3] = [*asked[3], lm.vocab_size]

    async def ask() -> list[Any]:
        many = (lm.next_token_logprobs(ids) for ids in asked)
        return await asyncio.wait_for(asyncio.gather(*many, return_exceptions=True), LIMIT_S)

    rows = asyncio.run(ask())
    assert isinstance(rows[3], ValueError)
    assert str(lm.vocab_size) in str(rows[3])
    for place in set(range(8)) - {3}:
        assert_row(rows[place], plain_row(asked[place]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_a_16_bit_model_sum_to_1(new_lm: Any, random_ids: Any, dtype: str) -> None:
    with new_lm(dtype=dtype) as lm:
        row = lm.next_token_logprobs_sync(random_ids(30, 12))
    assert row.dtype == np.float32
    assert np.exp(row.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)


@BOTH
def test_a_caller_cannot_edit_a_returned_row(lm: AsyncLM, random_ids: Any) -> None:
    ids = random_ids(31, 5)
    row = lm.next_token_logprobs_sync(ids)
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 0.0
    with pytest.raises(ValueError, match="WRITEABLE"):
        row.flags.writeable = True
    np.testing.assert_array_equal(lm.next_token_logprobs_sync(ids), row)


@EVERY
def test_an_edited_batch_does_not_change_later_answers(lm: AsyncLM, plain_row: Any, random_ids: Any) -> None:
    ids = random_ids(32, 5)
    lm.batch_next_token_logprobs_sync([ids, ids])[:] = 0.0
    assert_row(lm.next_token_logprobs_sync(ids), plain_row(ids))


def test_a_kept_row_does_not_keep_its_batch_alive(lm: AsyncLM, random_ids: Any) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(lm.next_token_logprobs(random_ids(40 + i, 6)) for i in range(12)))

    rows = asyncio.run(ask())
    bounds = [np.lib.array_utils.byte_bounds(_owner(row)) for row in rows]
    assert all(high - low == row.nbytes for (low, high), row in zip(bounds, rows, strict=True))
    storages = {_tensor_bytes(row) for row in rows}
    assert storages == {rows[0].nbytes}


def _owner(row: Any) -> Any:
    while isinstance(row.base, np.ndarray):
        row = row.base
    return row


def _tensor_bytes(row: Any) -> int:
    """Return the bytes of the memory behind a row: a torch storage, or the array itself."""
    owner = _owner(row)
    return owner.nbytes if owner.base is None else int(owner.base.untyped_storage().nbytes())


def test_more_asks_than_one_step_can_hold(new_lm: Any, plain_row: Any, random_ids: Any) -> None:
    asked = [random_ids(50, 10), random_ids(51, 10)]
    with new_lm(max_num_batched_tokens=16) as lm:
        rows = lm.batch_next_token_logprobs_sync(asked)
    for ids, row in zip(asked, rows, strict=True):
        assert_row(row, plain_row(ids))


@EVERY
def test_prompts_of_very_unequal_cached_length_keep_their_rows(
    lm: AsyncLM, plain_row: Any, random_ids: Any
) -> None:
    cached = random_ids(52, 60)
    lm.next_token_logprobs_sync(cached)
    asked = [random_ids(53, 1), [*cached, 5], random_ids(54, 30), cached[:40], random_ids(55, 2), cached]
    lm.clear_cache()
    rows = lm.batch_next_token_logprobs_sync(asked)
    for ids, row in zip(asked, rows, strict=True):
        assert_row(row, plain_row(ids))


@NEAR_AND_VLLM
def test_a_bad_prompt_leaves_nothing_behind_for_the_next_call(
    lm: AsyncLM, plain_row: Any, random_ids: Any
) -> None:
    good, too_long = random_ids(56, 6), random_ids(57, 129)
    for bad in ([lm.vocab_size], [-1], too_long, [[1, 2]], "text", None, [1.5]):
        with pytest.raises(ValueError, match=r"token_ids|prompt"):
            lm.batch_next_token_logprobs_sync([good, bad])
        with pytest.raises(ValueError, match=r"token_ids|prompt"):
            lm.next_token_logprobs_sync(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=str(lm._loaded.engine.capabilities().max_model_len)):
        lm.next_token_logprobs_sync(too_long)
    assert open_requests(lm) == []
    assert_row(lm.next_token_logprobs_sync(random_ids(58, 4)), plain_row(random_ids(58, 4)))


@EVERY
def test_an_asyncio_run_that_died_and_then_another(lm: AsyncLM, plain_row: Any, random_ids: Any) -> None:
    ids = random_ids(59, 20)

    async def dies() -> None:
        asked = asyncio.create_task(lm.next_token_logprobs(ids))
        await asyncio.sleep(0)
        assert not asked.done()
        raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        asyncio.run(dies())
    assert_row(asyncio.run(asyncio.wait_for(lm.next_token_logprobs(ids), LIMIT_S)), plain_row(ids))


@EVERY
def test_a_loop_closed_under_its_ask_fails_no_other(lm: AsyncLM, plain_row: Any, random_ids: Any) -> None:
    ids = random_ids(61, 20)
    loop = asyncio.new_event_loop()
    task = loop.create_task(lm.next_token_logprobs(ids))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert_row(lm.next_token_logprobs_sync(ids), plain_row(ids))
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # cannot end: its loop is closed
    task.get_coro().close()  # type: ignore[union-attr]


@EVERY
def test_logprobs_and_samples_asked_concurrently(lm: AsyncLM, plain_row: Any, random_ids: Any) -> None:
    asked = [random_ids(80 + place, 8) for place in range(6)]

    async def ask() -> Any:
        rows = (lm.next_token_logprobs(ids) for ids in asked)
        samples = (lm.sample(ids, 10, [], seed=1) for ids in asked)
        return await asyncio.gather(*rows, *samples)

    together = asyncio.run(ask())
    for ids, row, sample in zip(asked, together[:6], together[6:], strict=True):
        assert_row(row, plain_row(ids))
        assert sample == asyncio.run(lm.sample(ids, 10, [], seed=1))


def test_a_vocabulary_wider_than_the_tokenizers(wide_model_folder: Path, plain_rows_of: Any) -> None:
    from logprobe.next_token import AsyncLM

    with AsyncLM.from_name(str(wide_model_folder), kv_cache_memory_bytes=1 << 20) as lm:
        size = len(lm.tokenizer)
        assert lm.vocab_size == size + 13
        row = lm.next_token_logprobs_sync([5, 6])
        assert row.shape == (lm.vocab_size,)
        assert_row(row, plain_rows_of(wide_model_folder)([5, 6]))
        assert [token.token_id for token in lm.byte_vocab] == list(range(lm.vocab_size))
        assert bytes(lm.byte_vocab[size]) == b""
        assert lm.str_vocab[-1] == f"<{lm.vocab_size - 1}>"
        assert len(lm.next_token_logprobs_sync([lm.vocab_size - 1])) == lm.vocab_size


def test_one_of_two_instances_is_cleaned_up_and_the_other_works(
    new_lm: Any, plain_row: Any, random_ids: Any
) -> None:
    ids = random_ids(90, 7)
    with new_lm() as left:
        with new_lm() as right:
            right.next_token_logprobs_sync(ids)
        assert_row(left.next_token_logprobs_sync(ids), plain_row(ids))
        with pytest.raises(EngineClosedError):
            right.next_token_logprobs_sync(ids)


def test_a_trickle_of_asks_faster_than_the_timeout_does_not_hold_the_first(
    new_lm: Any, random_ids: Any
) -> None:
    with new_lm(timeout=0.3, batch_size=1000) as lm:
        lm.next_token_logprobs_sync([5])  # warm up

        async def ask() -> int:
            first = asyncio.create_task(lm.next_token_logprobs(random_ids(91, 5)))
            trickle = []
            for place in range(MAX_ASKS):
                trickle.append(asyncio.create_task(lm.next_token_logprobs(random_ids(1000 + place, 5))))
                await asyncio.sleep(0.02)
                if first.done():
                    break
            await asyncio.gather(*trickle)
            return len(trickle)

        assert asyncio.run(ask()) < MAX_ASKS


def test_twenty_prompts_of_4096_tokens_need_bounded_memory(long_model_folder: Path) -> None:
    from logprobe.next_token import AsyncLM

    prompts = np.random.default_rng(0).integers(0, 8000, (20, 4096))
    with AsyncLM.from_name(str(long_model_folder), kv_cache_memory_bytes=1 << 24) as lm:
        lm.next_token_logprobs_sync(prompts[0, :1500] ^ 1)  # several chunks, so that every kernel has run
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows = lm.batch_next_token_logprobs_sync(list(prompts))
        grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert rows.shape == (20, 8192)
    # Memory of the KV pool (committed on first use) and of long contexts is 100 MB. The logits of a single
    # prompt would add 4,096 x 8,192 x 4 bytes = 134 MB.
    assert grown_bytes < 200e6
