"""The engine on its thread: many event loops and threads, cancelled waiters, aborts, and shutdown."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, SamplingParams
from logprobe.engine.client import Client
from logprobe.errors import EngineClosedError, EngineError, ParameterError
from logprobe.testing import StepHold, holding_steps, open_requests, watching_steps
from logprobe.transport.messages import Request
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMIT_S = 120  # generous, also for a busy machine


@pytest.fixture
def llm(tiny_model_folder: Path) -> Iterator[LLM]:
    """A separate model, as these tests break or close it."""
    with LLM(
        str(tiny_model_folder), kv_cache_memory_bytes=1 << 19, max_num_batched_tokens=32, max_num_seqs=6
    ) as own:
        yield own


@pytest.fixture
def held(llm: LLM) -> Iterator[StepHold]:
    """Hold each step until the test releases it."""
    with holding_steps(llm) as hold:
        yield hold


def request(name: str, ids: Any = (5, 6, 7), **params: Any) -> Request:
    asked = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True} | params
    return Request(
        request_id=name,
        prompt_token_ids=np.array(list(ids), dtype=np.int32),
        params=SamplingParams(**asked),
    )


@pytest.mark.parametrize(("before", "after"), [(0.005, 0.001), (0.0002, 0.0002)])
def test_threads_take_turns_after_a_millisecond_where_an_engine_runs(
    tiny_model_folder: Path, before: float, after: float
) -> None:
    own = sys.getswitchinterval()
    sys.setswitchinterval(before)
    try:
        with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 19):
            assert sys.getswitchinterval() == pytest.approx(after)
    finally:
        sys.setswitchinterval(own)


def submit(llm: LLM, asked: Request) -> None:
    llm.engine.submit([llm.engine.admit(asked)])


async def ask(llm: LLM, name: str, ids: Any = (5, 6, 7), **params: Any) -> Any:
    submit(llm, request(name, ids, **params))
    return await asyncio.wait_for(llm.engine.result(name), LIMIT_S)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def is_idle(llm: LLM) -> bool:
    return not open_requests(llm) and llm.engine.stats().free_slots == llm.engine.capabilities().num_slots


def test_asks_from_several_threads_and_loops_get_their_own_answers(llm: LLM) -> None:
    answers: dict[str, list[int]] = {}

    async def many(thread: int) -> None:
        names = [f"{thread}-{index}" for index in range(6)]
        outputs = await asyncio.gather(
            *(ask(llm, name, [10 + thread, 20 + index]) for index, name in enumerate(names))
        )
        answers.update({output.request_id: output.outputs[0].token_ids for output in outputs})

    threads = [threading.Thread(target=asyncio.run, args=(many(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    prompts = [[10 + thread, 20 + index] for thread in range(4) for index in range(6)]
    want = llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert len(answers) == 24
    for ids, output in zip(prompts, want, strict=True):
        assert answers[f"{ids[0] - 10}-{ids[1] - 20}"] == output.outputs[0].token_ids
    wait_until(lambda: is_idle(llm))


def test_a_stream_grows_to_what_the_whole_result_is(llm: LLM) -> None:
    async def follow() -> list[tuple[list[int], int, int]]:
        params = {"max_tokens": 12, "logprobs": 2, "prompt_logprobs": 1}
        submit(llm, request("streamed", range(2, 60), **params))
        states = []
        # A small buffer forces several reads, however late this thread is scheduled.
        async for output in llm.engine.stream("streamed", buffer_rows=3):
            one = output.outputs[0]
            states.append((list(one.token_ids), len(one.logprobs), len(output.prompt_logprobs)))
        assert output.is_finished
        return states

    states = asyncio.run(follow())
    whole = asyncio.run(ask(llm, "whole", range(2, 60), max_tokens=12)).outputs[0].token_ids
    assert len(states) > 2
    for (before, *_), (after, *_) in pairwise(states):
        assert after[: len(before)] == before
    for tokens, num_rows, _ in states:
        assert num_rows >= len(tokens), "a token is seen before its numbers"
    assert states[-1] == (whole, 12, 58)


def test_a_cancelled_waiter_aborts_its_request_and_leaves_the_others(llm: LLM, held: StepHold) -> None:
    async def run() -> list[Any]:
        tasks = [asyncio.create_task(ask(llm, f"r{index}", [9, index + 2])) for index in range(8)]
        await asyncio.sleep(0.05)
        tasks[3].cancel()
        with suppress(asyncio.CancelledError):
            await tasks[3]
        assert tasks[3].cancelled()
        held.release()
        return await asyncio.gather(*tasks[:3], *tasks[4:])

    outputs = asyncio.run(run())
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 7
    wait_until(lambda: is_idle(llm))


def test_a_call_that_is_cancelled_before_its_readers_begin_leaves_nothing(llm: LLM) -> None:
    """Its tasks never take a step, so they cannot abort their requests themselves."""

    async def run() -> None:
        admitted = [llm.engine.admit(request(f"r{index}", max_tokens=100)) for index in range(2)]
        call = asyncio.create_task(Client(llm.engine, llm.text).run(admitted))
        await asyncio.sleep(0)  # it submits its requests, and makes the tasks that read them
        assert open_requests(llm) == ["r0", "r1"]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(run())
    assert open_requests(llm) == []
    wait_until(lambda: is_idle(llm))


def test_leaving_a_stream_early_frees_its_slots_within_a_step(llm: LLM) -> None:
    async def run() -> None:
        submit(llm, request("left", max_tokens=100))
        stream = llm.engine.stream("left")
        async for output in stream:
            if len(output.outputs[0].token_ids) >= 3:
                break
        await stream.aclose()

    asyncio.run(run())
    wait_until(lambda: is_idle(llm))


def test_an_abort_midway_ends_the_stream_with_what_there_is(llm: LLM, held: StepHold) -> None:
    async def run() -> Any:
        submit(llm, request("r", max_tokens=100, logprobs=0))
        stream = llm.engine.stream("r", buffer_rows=4)  # pauses the request when full
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        held.release()
        output = await first
        while not output.is_finished:
            if len(output.outputs[0].token_ids) >= 3:
                llm.engine.abort("r")
            output = await anext(stream)
        await stream.aclose()
        return output

    output = asyncio.run(run())
    one = output.outputs[0]
    assert one.finish_reason == "abort"
    assert 3 <= len(one.token_ids) == len(one.logprobs) < 100
    assert output.error is None
    wait_until(lambda: is_idle(llm))


def test_a_reader_whose_event_loop_was_closed_is_given_up(llm: LLM) -> None:
    loop = asyncio.new_event_loop()
    with watching_steps(llm, lambda _: time.sleep(0.02)):
        submit(llm, request("orphan", max_tokens=100))
        stream = llm.engine.stream("orphan")
        loop.run_until_complete(anext(stream))
        loop.close()
        wait_until(lambda: is_idle(llm))
    assert len(asyncio.run(ask(llm, "next")).outputs[0].token_ids) == 4


def test_an_asyncio_run_that_died_leaves_the_engine_at_work(llm: LLM, held: StepHold) -> None:
    async def die() -> None:
        waiting = asyncio.create_task(ask(llm, "gone", max_tokens=50))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        raise KeyError("died")

    with pytest.raises(KeyError):
        asyncio.run(die())
    held.release()
    assert len(asyncio.run(ask(llm, "next")).outputs[0].token_ids) == 4
    wait_until(lambda: is_idle(llm))


def test_the_event_loop_is_not_blocked_by_a_step(llm: LLM, held: StepHold) -> None:
    async def run() -> float:
        task = asyncio.create_task(ask(llm, "r"))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        submit(llm, request("other"))
        await asyncio.sleep(0)
        took = time.monotonic() - start
        held.release()
        await task
        await llm.engine.result("other")
        return took

    # The step is held until the event loop continues, so a loop that blocks on it would time out.
    assert asyncio.run(run()) < LIMIT_S / 2


def test_an_id_in_use_is_refused_and_the_first_goes_on(llm: LLM, held: StepHold) -> None:
    async def run() -> Any:
        submit(llm, request("same"))
        with raises(ParameterError, parameter="request_id"):
            submit(llm, request("same", [8, 9]))
        held.release()
        return await llm.engine.result("same")

    output = asyncio.run(run())
    assert output.prompt_token_ids == [5, 6, 7]
    assert asyncio.run(ask(llm, "same")).outputs[0].token_ids == output.outputs[0].token_ids


def test_an_unknown_id_is_refused(llm: LLM) -> None:
    with raises(ParameterError, parameter="request_id"):
        asyncio.run(llm.engine.result("nobody"))


def test_a_bad_request_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(ParameterError):
        submit(llm, request("bad", [5, 10**6]))
    assert is_idle(llm)
    assert len(asyncio.run(ask(llm, "bad")).outputs[0].token_ids) == 4


@pytest.mark.usefixtures("held")
def test_close_ends_every_waiting_request_with_an_error(llm: LLM) -> None:
    async def run() -> list[Any]:
        tasks = [asyncio.create_task(ask(llm, f"r{index}")) for index in range(10)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(llm.engine.close)
        return await asyncio.gather(*tasks)

    outputs = asyncio.run(run())
    assert all(isinstance(output.error, EngineClosedError) for output in outputs)
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}


def test_a_closed_engine_takes_nothing_more(llm: LLM) -> None:
    llm.engine.close()
    llm.engine.close()
    with pytest.raises(EngineClosedError, match="make a new one"):
        submit(llm, request("late"))


def test_a_bug_in_the_engine_ends_every_request_and_is_named(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, held: StepHold
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    async def run() -> list[Any]:
        tasks = [asyncio.create_task(ask(llm, f"r{index}", max_tokens=20)) for index in range(8)]
        await asyncio.sleep(0.05)
        monkeypatch.setattr(llm.engine.core.engine.scheduler, "schedule", fail)
        held.release()
        return await asyncio.gather(*tasks)

    outputs = asyncio.run(run())
    for output in outputs:
        assert isinstance(output.error, EngineError)
        assert "a bug" in str(output.error)
        assert isinstance(output.error.__cause__, ZeroDivisionError)
    with pytest.raises(EngineClosedError):
        submit(llm, request("late"))


def test_an_idle_engine_checks_its_slots(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = threading.Event()
    monkeypatch.setattr(llm.engine.core.engine.scheduler, "check_integrity", checked.set)
    asyncio.run(ask(llm, "r"))
    assert checked.wait(LIMIT_S)


def test_capabilities_state_the_limits(llm: LLM) -> None:
    facts = llm.engine.capabilities()
    assert (facts.max_num_batched_tokens, facts.max_num_seqs, facts.max_model_len) == (32, 6, 128)
    assert facts.num_slots == llm.engine.stats().free_slots
    assert (facts.engine, facts.device, facts.dtype) == ("native", "cpu", "float32")


def test_a_request_runs_on_what_its_name_stands_for_as_it_is_submitted(
    wide_heads: tuple[Path, dict[str, Path]],
) -> None:
    """Weights without users are released at once, even if a request was admitted with them."""
    model, folders = wide_heads
    with LLM(str(model), kv_cache_memory_bytes=1 << 20) as llm:
        llm.add_lora("own", folders["narrow"])
        want = asyncio.run(ask(llm, "want", lora="own", logprobs=0)).outputs[0].cumulative_logprob
        llm.add_lora("own", folders["wide"])
        late, gone, plain = (
            llm.engine.admit(request(name, logprobs=0, lora=lora))
            for name, lora in (("late", "own"), ("gone", "own"), ("plain", None))
        )
        llm.add_lora("own", folders["narrow"])
        llm.engine.submit([late])
        late_output = asyncio.run(llm.engine.result("late"))
        assert late_output.outputs[0].cumulative_logprob == pytest.approx(want, abs=1e-4)
        llm.remove_lora("own")
        with pytest.raises(ParameterError, match="no LoRA weights 'own'"):
            llm.engine.submit([plain, gone])
        llm.engine.submit([plain])  # so it was not accepted before
        plain_output = asyncio.run(llm.engine.result("plain"))
        assert plain_output.outputs[0].cumulative_logprob != pytest.approx(want, abs=1e-4)
