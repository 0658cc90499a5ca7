"""Fixtures that run tiny models in engine processes and check for leaks."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.engine.backends.process.replica import Replica
from logprobe.engine.backends.start import start_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from logprobe.config import EngineConfig
    from logprobe.engine.front import Front
    from logprobe.engine.request import RequestOutput
    from logprobe.transport.messages import Admitted, Request

LIMIT_S = 300  # generous, also for a busy machine


@pytest.fixture(scope="session")
def settings(config: EngineConfig) -> dict[str, Any]:
    """Engine settings in the form that the public entry points take."""
    own = config.keywords()
    return {
        name: own[name]
        for name in ("model", "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs", "weights")
    }


@pytest.fixture(scope="session")
def start(config: EngineConfig) -> Callable[..., AbstractContextManager[Front]]:
    """Start engine processes and stop them when the block ends."""

    @contextmanager
    def started(**more: Any) -> Iterator[Any]:
        engine = start_engine(replace(config, **{"process": True} | more)).engine
        try:
            yield engine
        finally:
            engine.close()

    return started


@pytest.fixture(scope="session")
def engine(started: Callable[[str], Any]) -> Front:
    """One engine process, shared by the tests that leave it running or restart it."""
    one: Front = started("process")
    return one


@pytest.fixture(scope="session")
def replicas(started: Callable[[str], Any]) -> Front:
    """Two replica processes, shared like `engine`."""
    both: Front = started("router")
    return both


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Record which replica each request was sent to, by number; it may end before a test looks."""
    taken: dict[str, int] = {}
    submit = Replica.submit

    def noted(replica: Replica, admitted: Sequence[Admitted]) -> None:
        taken.update({one.request.request_id: int(replica.name.split()[-1]) for one in admitted})
        submit(replica, admitted)

    monkeypatch.setattr(Replica, "submit", noted)
    return taken


class Teller:
    """Submit requests and collect their results, with a timeout on every wait."""

    def __init__(self, asker: Any) -> None:
        self._asker = asker

    def request(self, ids: Any = (5, 6, 7), **params: Any) -> Request:
        """Make a request with a unique id."""
        made: Request = self._asker.request(ids, **params)
        return made

    def submit(self, engine: Any, ids: Any = (5, 6, 7), **params: Any) -> str:
        """Submit a request and return its id."""
        [name] = self._asker.submit(engine, self._asker.request(ids, **params))
        return str(name)

    async def result(self, engine: Any, name: str) -> RequestOutput:
        """Wait for the output of a request."""
        return await asyncio.wait_for(engine.result(name), LIMIT_S)

    def ask(self, engine: Any, ids: Any = (5, 6, 7), **params: Any) -> RequestOutput:
        """Run a request and return its output."""
        return asyncio.run(self.result(engine, self.submit(engine, ids, **params)))


@pytest.fixture(scope="session")
def teller(asker: Any) -> Teller:
    return Teller(asker)
