"""A real server on a free port over a tiny model, and clients that talk to it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe import LLM


@dataclass(frozen=True)
class Running:
    """A server that listens, and the model behind it."""

    url: str
    llm: Any
    service: Any

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)


@contextmanager
def serving(llm: Any, **settings: Any) -> Iterator[Running]:
    """Serve the model of an `LLM` from a thread until the block ends."""
    import uvicorn

    from logprobe.engine.start import LoadedModel
    from logprobe.server.app import create_app
    from logprobe.server.run import uvicorn_config

    options = ServerSettings(**settings)
    app = create_app(LoadedModel(llm.engine, llm.text), options)
    listener = socket.create_server(("127.0.0.1", 0))
    # The kernel would else take in megabytes for a reader that reads nothing.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    server = uvicorn.Server(uvicorn_config(app, options))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", llm, app.state.service)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="session")
def new_server(tiny_llm: LLM) -> Callable[..., Any]:
    """Make a server with settings of its own on the tiny Llama; a context manager."""
    return lambda **settings: serving(tiny_llm, **settings)


@pytest.fixture(scope="session")
def server(tiny_llm: LLM) -> Iterator[Running]:
    """The tiny Llama served; logprobs without a cap."""
    with serving(tiny_llm, max_logprobs=-1) as running:
        yield running


@pytest.fixture(scope="session")
def capped_server(tiny_llm: LLM) -> Iterator[Running]:
    """The tiny Llama served with the settings as they come."""
    with serving(tiny_llm) as running:
        yield running


@pytest.fixture(scope="session")
def real_server(real_llm: LLM) -> Iterator[Running]:
    """SmolLM2 served."""
    with serving(real_llm) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Running) -> openai.OpenAI:
    """OpenAI's own client at the tiny server."""
    return server.client()
