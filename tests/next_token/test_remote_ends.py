"""Requests to a remote model that are refused, fail, exceed limits, are cancelled or closed."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import RemoteLLM
from logprobe.errors import EngineClosedError, ParameterError, ServerError
from logprobe.server import ServerSettings
from logprobe.server.http.errors import ApiError
from logprobe.testing import StepHold, failing_steps, open_requests

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.next_token import AsyncLM

LIMIT_S = 120  # generous, also for a busy machine
TOLERANCE = 5e-5  # nats: float32 rounding between steps with different batches


def wait_until(condition: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_the_one_that_the_server_refuses_fails_alone_of_eight(
    far: RemoteLLM, lm: AsyncLM, served: Any, random_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served[1].engine
    admit = engine.admit

    def picky(request: Any) -> Any:
        if 251 in request.prompt_token_ids:
            raise ParameterError("prompt", "holds 251")
        return admit(request)

    monkeypatch.setattr(engine, "admit", picky)
    asked = [random_ids(70 + place, 6) for place in range(8)]
    bad = [*asked[3], 251]

    async def ask() -> list[Any]:
        many = (far.next_token_logprobs(bad if place == 3 else asked[place]) for place in range(8))
        return await asyncio.wait_for(asyncio.gather(*many, return_exceptions=True), LIMIT_S)

    ended = asyncio.run(ask())
    assert isinstance(ended[3], ParameterError)
    assert str(ended[3]) == "prompts: holds 251"
    monkeypatch.undo()
    for place in set(range(8)) - {3}:
        want = lm.next_token_logprobs_sync(asked[place])
        np.testing.assert_allclose(ended[place], want, atol=TOLERANCE, rtol=0)


def test_a_forward_pass_that_raises_fails_its_asks_and_the_next_ask_works(
    far: RemoteLLM, lm: AsyncLM, random_ids: Any
) -> None:
    async def ask() -> list[Any]:
        rows = [far.next_token_logprobs(random_ids(80 + place, 6)) for place in range(5)]
        both = asyncio.gather(*rows, far.sample([5, 6], 4, []), return_exceptions=True)
        return await asyncio.wait_for(both, LIMIT_S)

    with failing_steps(lm, MemoryError("no room")):
        errors = asyncio.run(ask())
    assert {type(error) for error in errors} == {ServerError}
    assert all("no room" in str(error) for error in errors)
    assert not any(isinstance(end, Exception) for end in asyncio.run(ask()))


def test_a_full_server_is_waited_for(
    far: RemoteLLM, served: Any, random_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, refused = served[1].limits, []
    admit = limits.admit

    def full_at_first(cost: Any, *others: Any) -> Any:
        if len(refused) < 3:
            refused.append(cost)
            raise ApiError(429, "full", headers={"Retry-After": "0.1"})
        return admit(cost, *others)

    monkeypatch.setattr(limits, "admit", full_at_first)
    start = time.monotonic()
    assert far.next_token_logprobs_sync(random_ids(90, 6)).shape == (far.vocab_size,)
    assert time.monotonic() - start >= 0.3
    assert len(refused) == 3


def test_one_that_stays_full_is_an_error_in_time(
    served: Any, random_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise ApiError(429, "full", headers={"Retry-After": "0.1"})

    monkeypatch.setattr(served[1].limits, "admit", full)
    with RemoteLLM(served[0], request_timeout=LIMIT_S) as far:
        # Set only now: the requests at the start may take longer on a busy machine.
        monkeypatch.setattr(far._source._link, "_timeout_s", 0.5)  # type: ignore[attr-defined]

        async def ask() -> list[Any]:
            asks = [far.next_token_logprobs(random_ids(91, 6)), far.sample([5], 3, [])]
            return await asyncio.wait_for(asyncio.gather(*asks, return_exceptions=True), LIMIT_S)

        errors = asyncio.run(ask())
    assert [type(error) for error in errors] == [ServerError] * 2
    assert all("0.5 s" in str(error) and "request_timeout" in str(error) for error in errors)


def test_what_nobody_waits_for_is_given_up_on_the_server_too(
    far: RemoteLLM, lm: AsyncLM, random_ids: Any, held: StepHold
) -> None:
    stats = lm._loaded.engine.stats

    async def ask() -> None:
        tasks = [asyncio.create_task(far.next_token_logprobs(random_ids(110 + i, 6))) for i in range(3)]
        tasks.append(asyncio.create_task(far.sample([5, 6], 100, [])))
        await asyncio.to_thread(wait_until, lambda: len(open_requests(lm)) == len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(ask())
    source: Any = far._source
    wait_until(lambda: not source._exchanges and not source._gathered)
    held.release()
    wait_until(lambda: stats().running == stats().waiting == 0)
    far.next_token_logprobs_sync(random_ids(111, 3))
    assert not source._samples
    assert far._batcher._in_flight == {}


def test_many_clients_that_ask_and_leave_at_a_small_server_each_end_once(
    lm: AsyncLM, new_serving: Any, random_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logprobe.server.http.errors.RETRY_AFTER_S", 0.05)
    ends: list[Any] = []

    async def ask(far: RemoteLLM, draw: np.random.Generator) -> None:
        asked = [random_ids(int(seed), 6) for seed in draw.integers(200, 230, 12)]
        tasks = [asyncio.create_task(far.next_token_logprobs(ids)) for ids in asked]
        tasks += [asyncio.create_task(far.sample(ids, 5, [], seed=1)) for ids in asked[:4]]
        await asyncio.sleep(float(draw.random()) * 0.05)
        for place in draw.integers(0, 16, 5):
            tasks[place].cancel()
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2 * LIMIT_S)
        ends.extend(zip(asked + asked[:4], found, strict=True))

    with new_serving(lm._loaded, ServerSettings(max_requests=4)) as (url, app):
        clients = [RemoteLLM(url, cache_bytes=0, timeout=0.0), RemoteLLM(url, cache_bytes=0)]
        threads = [
            threading.Thread(
                target=asyncio.run, args=(ask(clients[place % 2], np.random.default_rng(place)),)
            )
            for place in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT_S)
        assert all(not client._source._samples for client in clients)  # type: ignore[attr-defined]
        for client in clients:
            client.close()
        wait_until(lambda: set(app.state.service.limits.in_use().values()) == {0})
    assert len(ends) == 6 * 16
    for ids, end in ends:
        if isinstance(end, list):
            assert end == asyncio.run(lm.sample(ids, 5, [], seed=1))
        elif not isinstance(end, asyncio.CancelledError):
            np.testing.assert_allclose(end, lm.next_token_logprobs_sync(ids), atol=TOLERANCE, rtol=0)


def test_asking_after_cleanup_is_a_runtime_error_and_cleanup_ends_every_ask(
    served: Any, lm: AsyncLM, random_ids: Any, held: StepHold
) -> None:
    far = RemoteLLM(served[0])

    async def ask() -> list[Any]:
        tasks = [asyncio.create_task(far.next_token_logprobs(random_ids(120 + i, 5))) for i in range(80)]
        tasks.append(asyncio.create_task(far.sample([5], 20, [])))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(far.close)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT_S)

    assert {type(end) for end in asyncio.run(ask())} == {EngineClosedError}
    held.release()
    far.close()
    for again in (lambda: far.next_token_logprobs_sync([5]), lambda: asyncio.run(far.sample([5], 2, []))):
        with pytest.raises(RuntimeError):
            again()
    assert lm.next_token_logprobs_sync([5]).shape == (lm.vocab_size,), "the server goes on"


def test_dropped_without_cleanup_it_leaves_no_thread(served: Any) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    far = RemoteLLM(served[0])
    far.next_token_logprobs_sync([5])
    source = weakref.ref(far._source)
    del far
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        gc.collect()
        left = [t for t in threading.enumerate() if t.ident not in before and t.name == "logprobe-loop"]
        if not left and source() is None:
            return
        time.sleep(0.05)
    pytest.fail(f"left behind: {left}, {source()}")
