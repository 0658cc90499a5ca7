"""Run a real server on a free port over a tiny model, with clients for it."""

from __future__ import annotations

import ssl
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from logprobe.server import ServerSettings
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe import LLM


# Shared by all clients: loading the system's certificates takes longer than a client's requests.
TLS = ssl.create_default_context()


@dataclass(frozen=True)
class Running:
    """A running server and the model behind it."""

    url: str
    llm: Any
    service: Any
    clients: ExitStack = field(default_factory=ExitStack)  # closed before the server

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S, verify=TLS)

    def post_bytes(self, path: str, data: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return httpx.post(self.url + path, content=data, headers=headers, timeout=PATIENCE_S, verify=TLS)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S, verify=TLS)

    def client(self, **options: Any) -> openai.OpenAI:
        new = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)
        return self.clients.enter_context(new)


@pytest.fixture(scope="session")
def serve_llm(new_serving: Any) -> Callable[..., Any]:
    """Serve the model of an `LLM` during the block."""

    @contextmanager
    def serve(llm: Any, processors: tuple[Any, ...] = (), **settings: Any) -> Iterator[Running]:
        with new_serving(llm, ServerSettings(**settings), processors) as (url, app):
            running = Running(url, llm, app.state.service)
            with running.clients:
                yield running

    return serve


@pytest.fixture(scope="session")
def new_server(tiny_llm: LLM, serve_llm: Any) -> Callable[..., Any]:
    """Make a server with given settings on the tiny Llama; a context manager."""
    return lambda **settings: serve_llm(tiny_llm, **settings)


@pytest.fixture(scope="session")
def server(new_server: Any) -> Iterator[Running]:
    """The tiny Llama served without a cap on logprobs."""
    with new_server(max_logprobs=-1) as running:
        yield running


@pytest.fixture(scope="session")
def capped_server(new_server: Any) -> Iterator[Running]:
    """The tiny Llama served with default settings."""
    with new_server() as running:
        yield running


@pytest.fixture(scope="session")
def real_server(real_llm: LLM, serve_llm: Any) -> Iterator[Running]:
    with serve_llm(real_llm) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Running) -> openai.OpenAI:
    """The OpenAI client, connected to the tiny server."""
    return server.client()
