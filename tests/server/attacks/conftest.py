"""A server in a subprocess, a client that attacks it, and a second one that polls its health."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from server_process import serving_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from server_process import Attacked


@pytest.fixture(scope="session")
def serve_process(tiny_model_folder: Path) -> Callable[..., Any]:
    """Serve the tiny Llama in a subprocess with the given flags; a context manager."""
    return lambda *flags: serving_process(tiny_model_folder, *flags)


@pytest.fixture(scope="session")
def attacked(serve_process: Any) -> Iterator[Attacked]:
    """The tiny Llama with the defaults of `logprobe serve`."""
    with serve_process() as server:
        yield server
