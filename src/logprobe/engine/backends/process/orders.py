"""Messages to and from an engine process, in addition to `transport.messages`: start, health, answers.

`Replica` uses them on the parent side, `child` on the engine side.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

# msgspec reads the annotations.
from logprobe.engine.protocol import Capabilities, EngineStats, Layout  # noqa: TC001
from logprobe.errors import LogprobeError  # noqa: TC001
from logprobe.transport.messages import Asked, Command, Delta, Failure, LoadLora, LoadWeights


class Start(msgspec.Struct, tag=True, frozen=True):
    """Load the model and serve; the first message."""

    settings: dict[str, Any]  # fields of `EngineConfig`
    loads: list[LoadLora | LoadWeights]  # load before serving; `LoadWeights` also replaces the weights
    weight_version: str | None = None  # required version of the checkpoint; None at the first start


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Finish the step in progress, then exit."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine accepts requests."""

    capabilities: Capabilities
    eos_token_ids: list[int]
    kv_bytes: int  # size of its KV cache


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start or cannot continue."""

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
"""Sent in lists: the events of one step are one message."""


def changed_model(model: str, expected: str | None, found: str | None) -> str:
    """Format the error for a checkpoint that changed after the engine was started."""
    return (
        f"model: the weights of {model} are {found}, but the engine was started with {expected}; "
        "restore the files, or create a new engine"
    )


class _Named(msgspec.Struct):
    request_id: str


class _Request(msgspec.Struct):
    request: _Named


class _Submit(msgspec.Struct, tag="Submit"):
    requests: list[_Request]


def request_ids(message: bytes) -> list[str]:
    """Extract the request ids of a `Submit` that cannot be decoded fully; empty for other messages."""
    try:
        submit = msgspec.msgpack.decode(message, type=_Submit)
    except msgspec.DecodeError:
        return []
    return [request.request.request_id for request in submit.requests]
