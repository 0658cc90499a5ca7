"""The engines of the conformance suite, each started once per test process.

An engine process takes seconds to start, so a test that breaks one must restore it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import shutil
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil
import pytest
import uvloop

from logprobe.config import EngineConfig
from logprobe.engine.backends.bridge import LoopThread
from logprobe.engine.backends.process import replica as replicas
from logprobe.engine.backends.start import start_engine, start_native_engine
from logprobe.integrations.remote.source import ServerRows
from logprobe.sampling import SamplingParams
from logprobe.server import ServerSettings
from logprobe.transport.messages import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from logprobe.engine.front import Front
    from logprobe.engine.request import RequestOutput

LIMIT_S = 240  # generous, also for a busy machine
VLLM_BLOCK = 32  # tokens per block of its prefix cache
CONTEXT_LEN = 4096  # more tokens than a request samples before its test aborts it


@contextmanager
def thread(config: EngineConfig, _: Any) -> Iterator[Front]:
    """The engine on a thread of this process."""
    engine = start_native_engine(config).engine
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def overlapped(config: EngineConfig, _: Any) -> Iterator[Front]:
    """The same with overlapped steps."""
    with thread(replace(config, async_scheduling=True), None) as engine:
        yield engine


@contextmanager
def speculating(config: EngineConfig, _: Any) -> Iterator[Front]:
    """The same with speculative drafts by prompt lookup."""
    with thread(replace(config, async_scheduling=True, speculate=True), None) as engine:
        yield engine


@contextmanager
def process(config: EngineConfig, _: Any, **settings: Any) -> Iterator[Front]:
    """The engine in its own process."""
    engine = start_engine(replace(config, **settings or {"process": True})).engine
    try:
        yield engine
    finally:
        engine.close()


def router(config: EngineConfig, _: Any) -> AbstractContextManager[Front]:
    """Two engine processes behind a router."""
    return process(config, _, data_parallel_size=2)


@contextmanager
def vllm(config: EngineConfig, _: Any, **more: Any) -> Iterator[Front]:
    """The model in vLLM, in eager mode."""
    options = {"enforce_eager": True, "block_size": VLLM_BLOCK, **more}
    with process(config, None, engine="vllm", weights="auto", engine_options=options) as engine:
        yield engine


def vllm_with_lora(config: EngineConfig, _: Any) -> AbstractContextManager[Front]:
    """vLLM with LoRA enabled, where it supports no prompt log-probabilities on a CPU."""
    return vllm(config, _, enable_lora=True, max_lora_rank=8)


class Remote(NamedTuple):
    """A client of a server, and the event loop it runs on."""

    source: ServerRows
    bridge: LoopThread


@contextmanager
def remote(config: EngineConfig, new_serving: Any) -> Iterator[Remote]:
    """A server of this library over HTTP."""
    loaded = start_native_engine(config)
    with new_serving(loaded, ServerSettings(model_name="tiny")) as (url, _):
        bridge = LoopThread()
        source = ServerRows(bridge, url, None, LIMIT_S)
        try:
            yield Remote(source, bridge)
        finally:
            source.close()
            bridge.close()
            loaded.engine.close()


EVERY: dict[str, Callable[[EngineConfig, Any], AbstractContextManager[Any]]] = {
    "thread": thread,
    "overlapped": overlapped,
    "speculating": speculating,
    "process": process,
    "router": router,
    "vllm": vllm,
}
WITH_LORA = {"vllm": vllm_with_lora}


def marked(engines: dict[str, Any]) -> list[Any]:
    """Return the engines' names as parameters, with the `vllm` mark where needed."""
    return [pytest.param(name, marks=pytest.mark.vllm) if name == "vllm" else name for name in engines]


@pytest.fixture(scope="session", autouse=True)
def _ended_processes_are_soon_started_again() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "LONGEST_DELAY_S", replicas.FIRST_DELAY_S)
        yield


@pytest.fixture(scope="session")
def config(
    wide_heads: tuple[Path, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory
) -> EngineConfig:
    """The tiny Llama with a longer context."""
    folder = tmp_path_factory.mktemp("long-llama")
    shutil.copytree(wide_heads[0], folder, dirs_exist_ok=True)
    settings = json.loads((folder / "config.json").read_text())
    settings["max_position_embeddings"] = CONTEXT_LEN
    (folder / "config.json").write_text(json.dumps(settings))
    return EngineConfig(
        model=str(folder),
        kv_cache_memory_bytes=1 << 23,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        logits_processors=("BannedWordsLogitsProcessor",),  # for requests with arguments for it
    )


@pytest.fixture(scope="session")
def adapter_folders(wide_heads: tuple[Path, dict[str, Path]]) -> dict[str, Path]:
    """LoRA weights for this suite's model."""
    return wide_heads[1]


@pytest.fixture(params=marked(EVERY))
def new_engine(
    request: pytest.FixtureRequest, config: EngineConfig, new_serving: Any
) -> Callable[[], AbstractContextManager[Front]]:
    """Start a new engine of each kind, for tests that break or close it."""
    return lambda: EVERY[request.param](config, new_serving)


@pytest.fixture(scope="session")
def started(config: EngineConfig, new_serving: Any) -> Iterator[Callable[..., Any]]:
    """Return the engine of a name, started on first use and shared by all tests."""
    running: dict[str, Any] = {}
    with ExitStack() as stack:

        def start(name: str, new: Any = None) -> Any:
            if name not in running:
                running[name] = stack.enter_context((new or EVERY[name])(config, new_serving))
            return running[name]

        yield start


@pytest.fixture(params=marked(EVERY))
def backend(request: pytest.FixtureRequest, started: Callable[..., Any]) -> Iterator[Front]:
    """Each engine, without requests before and after the test."""
    needs_lora = getattr(request.cls, "needs_lora", False) and request.param in WITH_LORA
    name = f"{request.param} with LoRA" if needs_lora else request.param
    engine: Front = started(name, WITH_LORA[request.param] if needs_lora else None)
    facts = engine.capabilities()
    num_slots = facts.num_slots * max(facts.num_processes, 1)
    wait_until(lambda: is_idle(engine, num_slots))
    yield engine
    wait_until(lambda: is_idle(engine, num_slots))


@pytest.fixture(scope="session")
def far(started: Callable[..., Any]) -> Remote:
    """The suite's model on a server."""
    there: Remote = started("remote", remote)
    return there


@pytest.fixture
def new_far(config: EngineConfig, new_serving: Any) -> Callable[[], AbstractContextManager[Remote]]:
    """Start a server, for tests that close its client."""
    return lambda: remote(config, new_serving)


@pytest.fixture
def reference(started: Callable[[str], Any]) -> Front:
    """The engine that all others are compared with."""
    engine: Front = started("thread")
    return engine


def is_idle(engine: Front, num_slots: int) -> bool:
    stats = engine.stats()
    return (stats.waiting, stats.running, stats.paused, stats.free_slots) == (0, 0, 0, num_slots)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


class Asker:
    """Make requests with unique ids and collect their results, with a timeout on every wait."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def request(self, ids: Sequence[int] = (5, 6, 7), *, wants_row: bool = False, **params: Any) -> Request:
        asked = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
        return Request(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=np.array(ids, dtype=np.int32),
            params=SamplingParams(**asked),
            wants_row=wants_row,
        )

    def submit(self, engine: Front, *requests: Request) -> list[str]:
        """Admit requests and submit them together; return their ids."""
        engine.submit([engine.admit(request) for request in requests])
        return [request.request_id for request in requests]

    async def ended(self, engine: Front, *requests: Request) -> list[RequestOutput]:
        """Run requests and return their outputs once all have ended."""
        names = self.submit(engine, *requests)
        return await asyncio.wait_for(asyncio.gather(*map(engine.result, names)), LIMIT_S)

    def ask(
        self, engine: Front, ids: Sequence[int] = (5, 6, 7), *, wants_row: bool = False, **params: Any
    ) -> RequestOutput:
        """Run one request and return its output."""
        [output] = asyncio.run(self.ended(engine, self.request(ids, wants_row=wants_row, **params)))
        return output


@pytest.fixture(scope="session")
def asker() -> Asker:
    return Asker()


@pytest.fixture
def block_size(backend: Front) -> int:
    """The granularity of the engine's prefix cache, in tokens."""
    return VLLM_BLOCK if backend.capabilities().engine == "vllm" else 1


def belongings(folder: Path) -> Counter[str]:
    """Count the resources of this process that a fault could leak."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed by another thread in the meantime
            links.append(str(link.readlink()))
    held = Counter(f"descriptor {link.split(':')[0]}" for link in links if "/proc/" not in link)
    held["children"] = len(psutil.Process().children(recursive=True))  # one may have been restarted
    held.update(map(str, Path("/dev/shm").glob("*logprobe*")))  # noqa: S108 - named shared memory
    held.update(map(str, folder.glob("logprobe-*")))
    return held


@pytest.fixture
def nothing_left(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    until: Callable[[Callable[[], bool]], None],
) -> Iterator[None]:
    """Check that the test leaked no processes, descriptors, shared memory or folders."""
    if request.node.get_closest_marker("vllm"):
        yield  # vLLM's own leaks are not this library's
        return
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    uvloop.new_event_loop().close()  # the first event loop of a process opens a pipe that stays
    gc.collect()  # garbage of earlier tests does not count
    before = belongings(tmp_path)
    yield
    gc.collect()
    until(lambda: not belongings(tmp_path) - before)


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait until a condition holds, or fail after a timeout."""
    return wait_until


@pytest.fixture(scope="session")
def limit_s() -> int:
    return LIMIT_S
