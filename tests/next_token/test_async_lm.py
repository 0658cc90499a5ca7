"""Results of `AsyncLM`, and how its requests are batched into steps."""

from __future__ import annotations

import asyncio
import gc
import itertools
import pickle
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.errors import ParameterError, RequestAbortedError
from logprobe.testing import holding_steps, open_requests, watching_steps
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logprobe.engine.protocol import StepBatch
    from logprobe.next_token import AsyncLM

LIMIT_S = 120.0  # generous, also for a busy machine
TOLERANCE = 2e-5
BOTH = pytest.mark.parametrize("lm", ["near", "far"], indirect=True)


@pytest.fixture
def counts(lm: AsyncLM) -> Iterator[list[int]]:
    """Record the number of tokens of each step."""
    found: list[int] = []
    with watching_steps(lm, lambda batch: found.append(len(batch.token_ids))):
        yield found


@BOTH
def test_sync_and_async_single_and_batch_give_the_same_rows(lm: AsyncLM, random_ids: Any) -> None:
    asked = [random_ids(seed, 4 + seed) for seed in range(5)]
    rows = asyncio.run(lm.batch_next_token_logprobs(asked))
    assert rows.shape == (5, lm.vocab_size)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(lm.batch_next_token_logprobs_sync(asked), rows)
    for ids, row in zip(asked, rows, strict=True):
        np.testing.assert_array_equal(lm.next_token_logprobs_sync(ids), row)
        np.testing.assert_array_equal(lm.next_token_logprobs_sync(np.array(ids)), row)


@BOTH
def test_a_batch_of_none_is_an_array_of_no_rows(lm: AsyncLM) -> None:
    assert lm.batch_next_token_logprobs_sync([]).shape == (0, lm.vocab_size)


def test_an_empty_prefix_is_the_bos_where_there_is_one(
    lm: AsyncLM, tiny_window_folder: Any, plain_row: Any
) -> None:
    from logprobe.next_token import AsyncLM as Class

    np.testing.assert_allclose(lm.next_token_logprobs_sync([]), plain_row([0]), atol=TOLERANCE, rtol=0)
    with (
        Class.from_name(str(tiny_window_folder), kv_cache_memory_bytes=1 << 20) as other,
        pytest.raises(ValueError, match="no BOS"),
    ):
        other.next_token_logprobs_sync([])


def test_equal_asks_in_flight_are_computed_once(lm: AsyncLM, random_ids: Any, counts: list[int]) -> None:
    ids = random_ids(1, 10)

    async def ask() -> list[Any]:
        return await asyncio.gather(*(lm.next_token_logprobs(ids) for _ in range(20)))

    rows = asyncio.run(ask())
    assert sum(counts) == 10
    assert len({row.__array_interface__["data"][0] for row in rows}) == 1


def test_one_token_more_costs_one_token_and_a_known_prefix_none(
    lm: AsyncLM, random_ids: Any, counts: list[int]
) -> None:
    ids = random_ids(2, 30)
    lm.next_token_logprobs_sync(ids)
    counts.clear()
    lm.next_token_logprobs_sync([*ids, 7])
    assert sum(counts) == 1
    lm.clear_cache()
    lm.next_token_logprobs_sync(ids[:17])
    assert sum(counts) == 1
    lm.clear_kv_cache()
    lm.next_token_logprobs_sync(ids[:16])
    assert sum(counts) == 17


def test_a_kept_row_costs_no_step_until_it_is_cleared(
    lm: AsyncLM, random_ids: Any, counts: list[int]
) -> None:
    ids = random_ids(3, 5)
    row = lm.next_token_logprobs_sync(ids)
    counts.clear()
    assert lm.next_token_logprobs_sync(ids) is row
    assert counts == []
    lm.clear_cache()
    assert lm.next_token_logprobs_sync(ids) is not row


def test_trie_rows_are_those_of_each_prefix_and_shared_tokens_run_once(
    lm: AsyncLM, plain_row: Any, random_ids: Any, counts: list[int]
) -> None:
    stem = random_ids(4, 6)
    sequences = [[*stem, 8, 9], [*stem, 8, 10], [*stem, 11], stem[:2]]
    rows = asyncio.run(lm.trie_logprobs(sequences))
    assert sum(counts) == 10
    assert len(rows) == 10
    for ids, row in rows.items():
        np.testing.assert_allclose(row, plain_row(ids), atol=TOLERANCE, rtol=0)


@BOTH
def test_extend_walks_token_by_token(lm: AsyncLM, plain_row: Any, random_ids: Any) -> None:
    ids = random_ids(5, 5)

    async def walk() -> Any:
        known = await lm.start(ids[:2])
        for token_id in ids[2:]:
            known = await lm.extend(known, token_id)
        return known

    known = asyncio.run(walk())
    assert known.token_ids.tolist() == ids
    np.testing.assert_allclose(known.logprobs, plain_row(ids), atol=TOLERANCE, rtol=0)
    for token_id in (1.5, True):
        with raises(ParameterError, parameter="token_id"):
            asyncio.run(lm.extend(known, token_id))


@BOTH
def test_topk_and_given_ids_are_parts_of_the_row(lm: AsyncLM, random_ids: Any) -> None:
    ids = random_ids(6, 5)
    row = lm.next_token_logprobs_sync(ids)
    top = asyncio.run(lm.next_token_topk(ids, 9))
    order = np.lexsort((np.arange(len(row)), -row))[:9]
    np.testing.assert_array_equal(top.token_ids, order)
    np.testing.assert_array_equal(top.logprobs, row[order])
    given = asyncio.run(lm.next_token_logprobs_for(ids, [3, 200, 3]))
    np.testing.assert_array_equal(given, row[[3, 200, 3]])
    with raises(ParameterError, parameter="logprob_token_ids"):
        asyncio.run(lm.next_token_logprobs_for(ids, [lm.vocab_size]))
    for k in (0, lm.vocab_size + 1, 1.5, True):
        with raises(ParameterError, parameter="k"):
            asyncio.run(lm.next_token_topk(ids, k))


def test_samples_follow_the_rows(lm: AsyncLM, random_ids: Any) -> None:
    prompt = random_ids(7, 6)
    samples = asyncio.run(lm.batch_sample([prompt] * 2000, 1, [], seed=0))
    drawn = np.bincount([sample[0] for sample in samples], minlength=lm.vocab_size) / 2000
    expected = np.exp(lm.next_token_logprobs_sync(prompt).astype(np.float64))
    error = np.sqrt(expected * (1 - expected) / 2000)
    assert (np.abs(drawn - expected) <= 5 * error + 1e-3).all()


@BOTH
def test_byte_vocab_spells_texts_exactly(lm: AsyncLM) -> None:
    text = "the cat and the dog, öfter"
    ids = lm.tokenizer.encode(text)
    assert b"".join(lm.byte_vocab[i] for i in ids).decode() == text
    token = lm.byte_vocab[ids[0]]
    assert token == pickle.loads(pickle.dumps(token))  # noqa: S301 - made here
    assert token != token.byte_string
    assert lm.byte_vocab[3] < lm.byte_vocab[4] <= lm.byte_vocab[4]
    assert lm.byte_vocab[4] > lm.byte_vocab[3] >= lm.byte_vocab[3]
    assert len({*lm.byte_vocab}) == len(lm.str_vocab) == lm.vocab_size


def test_batch_size_starts_an_idle_engine_at_once_and_timeout_a_smaller_batch(
    new_lm: Any, random_ids: Any
) -> None:
    async def ask(lm: AsyncLM, first: int, count: int) -> None:
        await asyncio.gather(*(lm.next_token_logprobs(random_ids(first + i, 4)) for i in range(count)))

    def seconds(lm: AsyncLM, first: int, count: int) -> float:
        start = time.perf_counter()
        asyncio.run(ask(lm, first, count))
        return time.perf_counter() - start

    with new_lm(batch_size=4, timeout=2 * LIMIT_S) as patient:
        assert seconds(patient, 100, 4) < LIMIT_S
    with new_lm(batch_size=4, timeout=0.5) as lm:
        assert seconds(lm, 200, 1) >= 0.45


def test_a_busy_engine_takes_asks_without_delay(new_lm: Any, random_ids: Any) -> None:
    with new_lm(batch_size=100, timeout=2 * LIMIT_S) as lm, holding_steps(lm) as hold:

        async def ask() -> None:
            async with asyncio.timeout(LIMIT_S):
                sample = asyncio.create_task(lm.sample(random_ids(8, 4), 60, []))
                await asyncio.to_thread(hold.wait)
                asked = asyncio.create_task(lm.next_token_logprobs(random_ids(9, 4)))
                while len(open_requests(lm)) < 2:  # noqa: ASYNC110 - an engine sets no event of a loop
                    await asyncio.sleep(0.005)
                hold.release()
                await asked
            sample.cancel()

        asyncio.run(ask())


def test_the_event_loop_is_not_blocked_while_rows_are_computed(new_lm: Any, random_ids: Any) -> None:
    with new_lm() as lm:
        ticks, num_steps = threading.Semaphore(0), itertools.count()

        def see_the_loop_tick(_: StepBatch) -> None:
            # If the event loop waited for this step it could not tick, and the step would fail.
            while ticks.acquire(blocking=False):
                continue
            for _ in range(3):
                assert ticks.acquire(timeout=LIMIT_S), "the event loop stands still while a step runs"
            next(num_steps)

        async def tick(is_done: asyncio.Event) -> None:
            while not is_done.is_set():
                ticks.release()
                await asyncio.sleep(0.001)

        async def ask() -> None:
            is_done = asyncio.Event()
            ticker = asyncio.create_task(tick(is_done))
            for seed in range(10):
                await lm.batch_next_token_logprobs([random_ids(100 * seed + i, 6) for i in range(8)])
            is_done.set()
            await ticker

        with watching_steps(lm, see_the_loop_tick):
            asyncio.run(ask())
    assert next(num_steps) >= 10


def test_reset_ends_every_ask_in_flight_and_later_ones_work(
    lm: AsyncLM, plain_row: Any, random_ids: Any
) -> None:
    async def ask() -> list[Any]:
        tasks = [asyncio.create_task(lm.next_token_logprobs(random_ids(300 + i, 5))) for i in range(40)]
        await asyncio.to_thread(hold.wait)
        lm.reset_async_queries()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT_S)

    with holding_steps(lm) as hold:
        assert {type(end) for end in asyncio.run(ask())} == {RequestAbortedError}
    ids = random_ids(300, 5)
    np.testing.assert_allclose(lm.next_token_logprobs_sync(ids), plain_row(ids), atol=TOLERANCE, rtol=0)


@BOTH
def test_asks_from_many_threads_and_loops_each_get_their_row(
    lm: AsyncLM, plain_row: Any, random_ids: Any
) -> None:
    got: dict[int, Any] = {}

    def work(number: int) -> None:
        asked = [random_ids(400 + (number + place) % 6, 8) for place in range(6)]
        if number % 2:
            got[number] = asyncio.run(lm.batch_next_token_logprobs(asked))
        else:
            got[number] = [lm.next_token_logprobs_sync(ids) for ids in asked]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(got) == list(range(8))
    for number, rows in got.items():
        for place, row in enumerate(rows):
            want = plain_row(random_ids(400 + (number + place) % 6, 8))
            np.testing.assert_allclose(row, want, atol=TOLERANCE, rtol=0)


def test_dropped_without_cleanup_it_leaves_no_thread_and_no_engine(new_lm: Any) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    lm = new_lm()
    lm.next_token_logprobs_sync([5])
    engine = weakref.ref(lm._loaded.engine)
    del lm
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        gc.collect()
        left = [t for t in threading.enumerate() if t.ident not in before and t.name.startswith("logprobe")]
        if not left and engine() is None:
            return
        time.sleep(0.05)
    pytest.fail(f"left behind: {left}, {engine()}")


def test_two_front_doors_share_an_engine_and_one_may_leave(
    tiny_llm: Any, plain_row: Any, random_ids: Any
) -> None:
    from logprobe.engine.backends.start import LoadedModel
    from logprobe.next_token import AsyncLM as Class

    ids = random_ids(9, 6)
    with Class(LoadedModel(tiny_llm.engine, tiny_llm.text)) as lm:
        np.testing.assert_allclose(lm.next_token_logprobs_sync(ids), plain_row(ids), atol=TOLERANCE, rtol=0)
    assert tiny_llm.generate([ids])[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("timeout", -1.0), ("timeout", float("nan")), ("engine", "nothing")],
)
def test_a_setting_out_of_range_is_named(new_lm: Any, name: str, value: Any) -> None:
    with raises(ParameterError, parameter=name):
        new_lm(**{name: value})


@pytest.mark.real_model
def test_rows_of_the_real_model_equal_a_plain_forward_pass(
    real_llm: Any, plain_rows_of: Any, smollm2_folder: Path
) -> None:
    from logprobe.engine.backends.start import LoadedModel
    from logprobe.next_token import AsyncLM as Class

    plain = plain_rows_of(smollm2_folder)
    texts = ["The capital of France is", "The capital of France", "def main():\n    ", "1 + 1 ="]
    asked = [real_llm.text.encode(text).tolist() for text in texts]
    with Class(LoadedModel(real_llm.engine, real_llm.text)) as lm:
        together = lm.batch_next_token_logprobs_sync(asked * 50)
        for ids, row in zip(asked * 50, together, strict=True):
            np.testing.assert_array_equal(row, lm.next_token_logprobs_sync(ids))
        for ids, row in zip(asked, together, strict=False):
            np.testing.assert_allclose(row, plain(ids), atol=2e-4, rtol=0)
            assert np.exp(row.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
