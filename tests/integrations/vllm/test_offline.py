"""`OfflineClient` with a fake vLLM engine: the calls it makes, and how each request ends."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.errors import EngineClosedError
from logprobe.integrations.vllm.offline import OfflineClient

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 60


@dataclass
class StandIn:
    """A fake of the methods of vLLM's `LLMEngine` that are used; requests say how many tokens they get."""

    vllm_config: str = "configuration"
    running: dict[str, int] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    loras: list[Any] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    sizes: list[int] = field(default_factory=list)  # requests per step
    gate: threading.Event = field(default_factory=threading.Event)
    fault: Exception | None = None
    engine_core: Any = None

    def add_request(self, request_id: str, prompt: int, params: Any, *, lora_request: Any) -> None:
        self.threads.add(threading.get_ident())
        if prompt < 1:
            raise ValueError("too short")
        self.running[request_id] = prompt
        self.loras.append((params, lora_request))

    def step(self) -> list[Any]:
        self.threads.add(threading.get_ident())
        assert self.gate.wait(LIMIT_S)
        if self.fault is not None:
            raise self.fault
        self.sizes.append(len(self.running))
        outputs = []
        for request_id in list(self.running):
            self.running[request_id] -= 1
            left = self.running[request_id]
            outputs.append(SimpleNamespace(request_id=request_id, finished=not left, left=left))
            if not left:
                del self.running[request_id]
        return outputs

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        self.threads.add(threading.get_ident())
        if method == "broken":
            raise ZeroDivisionError("in the worker")
        return [(method, *args)]

    def add_lora(self, request: Any) -> bool:
        return request == "good"


@pytest.fixture
def engine() -> StandIn:
    stand_in = StandIn()
    stand_in.gate.set()
    return stand_in


@pytest.fixture
def client(engine: StandIn) -> Iterator[OfflineClient]:
    made = OfflineClient(SimpleNamespace(llm_engine=engine))
    yield made
    engine.gate.set()
    made.shutdown()


async def lefts(client: OfflineClient, request_id: str, num_tokens: int) -> list[int]:
    outputs = client.generate(num_tokens, "params", request_id, lora_request="lora")
    return [output.left async for output in outputs]


def test_requests_run_together_and_each_gets_its_own_outputs(client: OfflineClient, engine: StandIn) -> None:
    engine.gate.clear()

    async def ask() -> Any:
        asked = [asyncio.ensure_future(lefts(client, f"r{count}", count)) for count in (3, 1, 2)]
        await asyncio.sleep(0)  # all are queued: the first step takes some, the second the rest
        engine.gate.set()
        return await asyncio.wait_for(asyncio.gather(*asked), LIMIT_S)

    assert asyncio.run(ask()) == [[2, 1, 0], [0], [1, 0]]
    assert max(engine.sizes) >= 2
    assert engine.loras == [("params", "lora")] * 3
    assert len(engine.threads) == 1, "vLLM's engine is used by one thread"


def test_a_request_that_is_refused_ends_alone(client: OfflineClient) -> None:
    async def ask() -> Any:
        asked = [lefts(client, "bad", 0), lefts(client, "good", 2)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), LIMIT_S)

    bad, good = asyncio.run(ask())
    assert isinstance(bad, ValueError)
    assert good == [1, 0]
    assert asyncio.run(lefts(client, "next", 1)) == [0]


def test_leaving_early_aborts_and_an_ended_request_is_left_alone(
    client: OfflineClient, engine: StandIn
) -> None:
    async def leave() -> None:
        outputs = client.generate(10**9, "params", "left")
        async for _ in outputs:
            break
        await outputs.aclose()
        await client.abort("left")
        await client.collective_rpc("passed")  # runs after the abort

    asyncio.run(asyncio.wait_for(leave(), LIMIT_S))
    assert engine.aborted == ["left"]
    assert asyncio.run(lefts(client, "next", 2)) == [1, 0]
    assert engine.aborted == ["left"]


def test_calls_to_the_workers_give_their_answers_or_their_error(
    client: OfflineClient, engine: StandIn
) -> None:
    async def ask() -> None:
        assert await client.collective_rpc("method", args=(1, b"2")) == [("method", 1, b"2")]
        with pytest.raises(ZeroDivisionError, match="in the worker"):
            await client.collective_rpc("broken")
        assert await client.add_lora("good")
        assert not await client.add_lora("bad")

    asyncio.run(asyncio.wait_for(ask(), LIMIT_S))
    assert threading.get_ident() not in engine.threads
    assert client.vllm_config == "configuration"


def test_the_event_loop_goes_on_while_vllm_takes_a_step(client: OfflineClient, engine: StandIn) -> None:
    ticks = threading.Semaphore(0)
    step = engine.step

    def step_beside_the_loop() -> list[Any]:
        # If the event loop waited for this step it could not tick, and the step would fail.
        while ticks.acquire(blocking=False):
            continue
        for _ in range(3):
            assert ticks.acquire(timeout=LIMIT_S), "the event loop stands still while a step runs"
        return step()

    async def tick() -> None:
        while True:
            ticks.release()
            await asyncio.sleep(0.001)

    async def ask() -> Any:
        ticker = asyncio.ensure_future(tick())
        answers = await asyncio.gather(*(lefts(client, f"r{count}", count) for count in (4, 2)))
        ticker.cancel()
        return answers

    engine.step = step_beside_the_loop  # type: ignore[method-assign]
    assert asyncio.run(asyncio.wait_for(ask(), LIMIT_S)) == [[3, 2, 1, 0], [1, 0]]


def test_an_engine_that_dies_ends_its_requests_and_those_to_come(
    client: OfflineClient, engine: StandIn
) -> None:
    async def ask() -> list[Any]:
        asked = [lefts(client, f"r{count}", count) for count in (3, 2)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), LIMIT_S)

    engine.fault = MemoryError("no room")
    assert not client.errored
    assert [str(end) for end in asyncio.run(ask())] == ["no room", "no room"]
    assert client.errored
    with pytest.raises(MemoryError):
        asyncio.run(asyncio.wait_for(lefts(client, "late", 1), LIMIT_S))


@pytest.mark.parametrize("is_owned", [True, False])
def test_a_shutdown_ends_an_engine_of_its_own_alone(engine: StandIn, is_owned: bool) -> None:
    ends: list[str] = []
    engine.engine_core = SimpleNamespace(shutdown=lambda: ends.append("ended"))
    client = OfflineClient(SimpleNamespace(llm_engine=engine), is_owned=is_owned)
    client.shutdown()
    client.shutdown()
    assert ends == ["ended"] * is_owned


def test_a_shutdown_ends_what_runs_and_leaves_the_engine_to_its_owner(engine: StandIn) -> None:
    client = OfflineClient(SimpleNamespace(llm_engine=engine))
    engine.gate.clear()

    async def ask() -> Any:
        outputs = client.generate(10**9, "params", "long")
        first = anext(outputs)
        engine.gate.set()
        await asyncio.wait_for(first, LIMIT_S)
        await asyncio.to_thread(client.shutdown)
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(rest(outputs), LIMIT_S)

    async def rest(outputs: Any) -> None:
        async for _ in outputs:
            continue

    asyncio.run(ask())
    client.shutdown()
    assert engine.aborted == ["long"]
    assert not client._thread.is_alive()
    with pytest.raises(EngineClosedError):
        asyncio.run(lefts(client, "late", 1))
