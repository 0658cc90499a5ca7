"""Messages between `Replica`, in the parent process, and `child`, in the engine process.

They cover start and stop, heartbeats, and answers to commands; requests and events are in
`transport.messages`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

# msgspec reads the annotations.
from logprobe.engine.protocol import Capabilities, EngineStats, Layout  # noqa: TC001
from logprobe.errors import LogprobeError  # noqa: TC001
from logprobe.transport.messages import Asked, Command, Delta, Failure, LoadLora, LoadWeights


class Start(msgspec.Struct, tag=True, frozen=True):
    """Tells a process to load the model and serve; always the first message."""

    settings: dict[str, Any]  # fields of `EngineConfig`
    loads: list[LoadLora | LoadWeights]  # weights to load before serving; `LoadWeights` are put into use
    weight_version: str | None = None  # required version of the checkpoint; None at the first start


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Tells a process to finish the step in progress and exit."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Reports that the model is loaded and the engine accepts requests."""

    capabilities: Capabilities
    eos_token_ids: list[int]
    kv_bytes: int  # size of the engine's KV cache


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """Reports that the engine could not start or cannot continue."""

    error: LogprobeError


class Pulse(msgspec.Struct, tag=True, frozen=True):
    """Heartbeat, sent several times a second."""

    stats: EngineStats
    stalled_s: float  # see `Front.stalled_s`


class Answer(msgspec.Struct, tag=True, frozen=True):
    """Reply to the command with this number."""

    number: int
    layout: Layout | None = None  # set for `LoadWeights`
    error: LogprobeError | None = None


Order: TypeAlias = Start | Stop | Command | Asked
Report: TypeAlias = Delta | Failure | Ready | Stopped | Pulse | Answer
"""Reports are sent in lists; the events of a step form one message."""


def changed_model(model: str, expected: str | None, found: str | None) -> str:
    """Return the error message for a checkpoint that has changed since the engine was started.

    Args:
        model: name or path of the model.
        expected: version of the weights that the engine was started with.
        found: version of the weights in the model's files now.
    """
    return (
        f"model: the weights of {model} have version {found}, but the engine was started with {expected}; "
        "restore the files, or create a new engine"
    )


class _Named(msgspec.Struct):
    request_id: str


class _Request(msgspec.Struct):
    request: _Named


class _Submit(msgspec.Struct, tag="Submit"):
    requests: list[_Request]


def request_ids(message: bytes) -> list[str]:
    """Return the request ids in an encoded `Submit` that cannot be decoded; empty for other messages."""
    try:
        submit = msgspec.msgpack.decode(message, type=_Submit)
    except msgspec.DecodeError:
        return []
    return [request.request.request_id for request in submit.requests]
