"""A server from its settings to its end: load, listen, drain, exit.

Before it: `logprobe serve`. After it: the application.
"""

from __future__ import annotations

import logging
import signal
import socket
from typing import TYPE_CHECKING

import uvicorn

from logprobe.config import require
from logprobe.engine.backends.start import start_native_engine
from logprobe.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from fastapi import FastAPI

    from logprobe.config import EngineConfig
    from logprobe.engine.backends.start import LoadedModel
    from logprobe.server.settings import ServerSettings

BACKLOG = 2048

logger = logging.getLogger("logprobe.server")


def serve(
    config: EngineConfig, settings: ServerSettings, *, ready: Callable[[str], object] | None = None
) -> None:
    """Serve a model until SIGTERM or SIGINT; requests in progress then have `drain_s` to end.

    `ready` is told the address once the server listens.

    Raises:
        ModelError: the model or an adapter cannot be had or used.
        ParameterError: the settings do not fit the model, or two adapters have one name.
        OSError: the address cannot be listened on.
    """
    with socket.create_server((settings.host, settings.port), backlog=BACKLOG) as listener:
        model = start_native_engine(config)
        try:
            load_adapters(model, settings)
            app = create_app(model, settings, config.logits_processors)
            host, port = listener.getsockname()[:2]
            if ready is not None:
                ready(f"http://{host}:{port}")
            run_server(app, settings, listener)
        finally:
            model.engine.close()


def load_adapters(model: LoadedModel, settings: ServerSettings) -> None:
    """Load the adapters that the settings name.

    Raises:
        ModelError: a folder cannot be read, or does not fit the model.
        ParameterError: a name is the model's own, or given twice.
    """
    own = {settings.model_name, model.engine.capabilities().model}
    for given in settings.lora:
        name, _, path = given.partition("=")
        require(name not in own, "lora", f"{name!r} is the model's own name; choose another")
        model.engine.add_lora(name, path)


def run_server(app: FastAPI, settings: ServerSettings, listener: socket.socket) -> None:
    """Run uvicorn on a listening socket until a signal has been drained."""
    server = uvicorn.Server(uvicorn_config(app, settings))

    def drain(number: int, _: FrameType | None) -> None:
        app.state.service.is_draining = True
        logger.info("signal %d: no new requests; those in progress may end", number)

    # uvicorn stops on these and, once it has ended, raises them again for the handlers of before: these.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)
    server.run([listener])


def uvicorn_config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    """How uvicorn runs the application."""
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(round(settings.drain_s), 1),
        lifespan="off",
    )
