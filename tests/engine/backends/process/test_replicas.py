"""Several engine processes behind one router: distribution of requests, and recovery when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from logprobe.errors import EngineError
from logprobe.kernels import threads
from logprobe.server.metrics import Metrics
from logprobe.testing import process_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe.engine.front import Front

    Until = Callable[[Callable[[], bool]], None]

NAMES = ["replica 0", "replica 1"]
LONG = 4000  # more tokens than any test waits for


def num_restarts(engine: Front) -> list[int]:
    return [stats.restarts for stats in engine.stats().replicas.values()]


def load(engine: Front) -> list[int]:
    return [replica.num_queued_tokens for replica in engine.core._replicas]


def test_there_are_two_processes_that_share_the_threads(replicas: Front) -> None:
    pids = set(process_ids(replicas))
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert replicas.capabilities().num_processes == 2
    assert list(replicas.stats().replicas) == NAMES
    assert replicas.stats().free_slots == 2 * replicas.capabilities().num_slots
    assert replicas.core._launcher._threads == max(threads.num_threads() // 2, 1)


def test_requests_are_shared_out_by_what_waits_and_counted_until_they_end(
    replicas: Front, teller: Any, places: dict[str, int]
) -> None:
    names = [teller.submit(replicas, [5, 6, index], max_tokens=LONG) for index in range(6)]
    assert sorted(places.values()) == [0, 0, 0, 1, 1, 1]
    assert all(0 < tokens <= 3 * (3 + LONG) for tokens in load(replicas))

    async def give_up() -> None:
        for name in names:
            replicas.abort(name)
        for output in await asyncio.gather(*(teller.result(replicas, name) for name in names)):
            assert output.outputs[0].finish_reason == "abort"

    asyncio.run(give_up())
    assert load(replicas) == [0, 0]


def test_every_replica_has_the_lora_weights(
    replicas: Front, teller: Any, adapter_folders: dict[str, Path], places: dict[str, int]
) -> None:
    replicas.add_lora("a", adapter_folders["wide"])
    names = [teller.submit(replicas, [9, 8, 7], lora="a", logprobs=2) for _ in range(4)]
    assert set(places.values()) == {0, 1}

    async def results() -> list[Any]:
        return await asyncio.gather(*(teller.result(replicas, name) for name in names))

    first, *others = asyncio.run(results())
    for output in others:
        assert output.outputs[0].token_ids == first.outputs[0].token_ids
    replicas.remove_lora("a")


def test_metrics_tell_the_replicas_apart(replicas: Front, teller: Any, until: Until) -> None:
    for _ in range(2):
        teller.ask(replicas, [33, 44, 55])
    until(lambda: all(part.seconds["forward"] > 0 for part in replicas.stats().replicas.values()))
    text = asyncio.run(Metrics(lambda: {"": replicas}).text()).decode()
    labels: dict[str, set[str | None]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).add(sample.labels.get("replica"))
    for name in (
        "free_slots",
        "running_requests",
        "step_seconds_total",
        "engine_restarts_total",
        "engine_up",
    ):
        assert labels[f"logprobe_{name}"] == {"0", "1"}, name
    assert labels["logprobe_queue_seconds_count"] == labels["logprobe_engine_step_seconds_sum"] == {"0", "1"}


@pytest.mark.usefixtures("nothing_left")
def test_a_replica_that_is_stopped_is_told_and_left_out_while_the_rest_goes_on(
    replicas: Front, teller: Any, places: dict[str, int], until: Until
) -> None:
    until(lambda: all(replica.is_up for replica in replicas.core._replicas))
    pids, before = process_ids(replicas), num_restarts(replicas)
    prompts = [[5, 6, index] for index in range(2)]
    names = [teller.submit(replicas, ids, max_tokens=2000, logprobs=2) for ids in prompts]
    [held, free] = sorted(names, key=places.__getitem__)

    async def stop_one() -> dict[str, Any]:
        waiting = {name: asyncio.create_task(teller.result(replicas, name)) for name in names}
        os.kill(pids[0], signal.SIGSTOP)
        try:
            await asyncio.to_thread(until, lambda: "replica 0 has not answered" in replicas.stats().why_down)
            assert replicas.stats().is_up
            later = [teller.submit(replicas, [7, index], max_tokens=20) for index in range(4)]
            assert {places[name] for name in later} == {1}
            for name in later:
                assert len((await teller.result(replicas, name)).outputs[0].token_ids) == 20
            await waiting[free]
            assert not waiting[held].done()
            # The other replica may be in a step, so only one of the two values is sure to grow.
            assert replicas.stalled_s() < replicas.stalled_s([held])
        finally:
            os.kill(pids[0], signal.SIGCONT)
        return {name: await task for name, task in waiting.items()}

    outputs = asyncio.run(stop_one())
    until(lambda: not replicas.stats().why_down)
    assert (process_ids(replicas), num_restarts(replicas)) == (pids, before)
    for name, ids in zip(names, prompts, strict=True):
        expected = teller.ask(replicas, ids, max_tokens=2000, logprobs=2).outputs[0]
        assert outputs[name].error is None
        assert outputs[name].outputs[0].token_ids == expected.token_ids
        assert outputs[name].outputs[0].logprobs == expected.logprobs


@pytest.mark.usefixtures("nothing_left")
def test_a_replica_that_dies_fails_its_own_requests_and_the_rest_goes_on(
    replicas: Front, teller: Any, places: dict[str, int], until: Until
) -> None:
    until(lambda: all(replica.is_up for replica in replicas.core._replicas))
    before = num_restarts(replicas)
    names = [teller.submit(replicas, [5, 6, index], max_tokens=2000) for index in range(4)]
    assert sorted(places.values()) == [0, 0, 1, 1]

    async def kill_one() -> dict[str, Any]:
        waiting = {name: asyncio.create_task(teller.result(replicas, name)) for name in names}
        os.kill(process_ids(replicas)[0], signal.SIGKILL)
        later = teller.submit(replicas, [7, 7, 7], max_tokens=20)
        return {name: await task for name, task in waiting.items()} | {
            "later": await teller.result(replicas, later)
        }

    outputs = asyncio.run(kill_one())
    for name in names:
        error = outputs[name].error
        if places[name] == 0:
            assert isinstance(error, EngineError)
            assert str(error).startswith("replica 0 (pid ")
        else:
            assert error is None
            assert len(outputs[name].outputs[0].token_ids) == 2000
    assert outputs["later"].error is None or "replica 0" in str(outputs["later"].error)
    until(lambda: replicas.core._replicas[0].is_up)
    assert num_restarts(replicas) == [before[0] + 1, before[1]]
    assert [len(teller.ask(replicas, [index]).outputs[0].token_ids) for index in range(4, 8)] == [8] * 4
