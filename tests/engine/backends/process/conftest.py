"""Engine processes over tiny models, and what they leave behind."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import fields, replace
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

LIMIT_S = 300  # nothing takes as long, also on a busy machine


@pytest.fixture(scope="session")
def settings(config: EngineConfig) -> dict[str, Any]:
    """Of an engine, as the front doors take them."""
    own = {field.name: getattr(config, field.name) for field in fields(config)}
    return {
        name: own[name] for name in ("model", "kv_bytes", "max_batch_tokens", "max_batch_rows", "weights")
    }


@pytest.fixture(scope="session")
def start(config: EngineConfig) -> Callable[..., AbstractContextManager[Front]]:
    """Start engine processes, which are gone after the block."""

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
    """One process for all tests that leave it whole, or have it started again."""
    one: Front = started("process")
    return one


@pytest.fixture(scope="session")
def replicas(started: Callable[[str], Any]) -> Front:
    """Two processes, likewise."""
    both: Front = started("router")
    return both


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Which replica each request of this test was given to, by its number: it may end before one can look."""
    taken: dict[str, int] = {}
    submit = Replica.submit

    def noted(replica: Replica, admitted: Sequence[Admitted]) -> None:
        taken.update({one.request.request_id: int(replica.name.split()[-1]) for one in admitted})
        submit(replica, admitted)

    monkeypatch.setattr(Replica, "submit", noted)
    return taken


class Teller:
    """Requests by their ids and parameters, and what becomes of them; no wait is endless."""

    def __init__(self, asker: Any) -> None:
        self._asker = asker

    def request(self, ids: Any = (5, 6, 7), **params: Any) -> Request:
        """A request with a name of its own."""
        made: Request = self._asker.request(ids, **params)
        return made

    def submit(self, engine: Any, ids: Any = (5, 6, 7), **params: Any) -> str:
        """Have a request run; its name."""
        [name] = self._asker.submit(engine, self._asker.request(ids, **params))
        return str(name)

    async def result(self, engine: Any, name: str) -> RequestOutput:
        """What a request comes to."""
        return await asyncio.wait_for(engine.result(name), LIMIT_S)

    def ask(self, engine: Any, ids: Any = (5, 6, 7), **params: Any) -> RequestOutput:
        """What a new request comes to."""
        return asyncio.run(self.result(engine, self.submit(engine, ids, **params)))


@pytest.fixture(scope="session")
def teller(asker: Any) -> Teller:
    return Teller(asker)
