"""What crosses the wall beside `transport.messages`: an engine process's start, its health and its answers.

`Replica` speaks on the front's side, `child` on the engine's.
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
    loads: list[LoadLora | LoadWeights]  # to be there from the beginning; other weights answer, too
    weight_version: str | None = None  # that the checkpoint must still have; None at the first start


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Let the step in progress end, and the process with it."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine takes requests."""

    capabilities: Capabilities
    eos_token_ids: list[int]
    kv_bytes: int  # of its pool


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start, or cannot go on."""

    error: LogprobeError


class Pulse(msgspec.Struct, tag=True, frozen=True):
    """A sign of life, several times a second."""

    stats: EngineStats
    stalled_s: float  # as `Front.stalled_s`


class Answer(msgspec.Struct, tag=True, frozen=True):
    """What became of what was asked by this number."""

    number: int
    layout: Layout | None = None  # of `LoadWeights`: how the layers run
    error: LogprobeError | None = None


Order: TypeAlias = Start | Stop | Command | Asked
Report: TypeAlias = Delta | Failure | Ready | Stopped | Pulse | Answer
"""They come in lists: what a step found is one message."""


def changed_model(model: str, expected: str | None, found: str | None) -> str:
    """Say that the files of a model are not those that the engine was started with."""
    return (
        f"model: the weights of {model} are {found}, and the engine was started with {expected}; "
        "restore the files, or make a new engine"
    )


class _Named(msgspec.Struct):
    request_id: str


class _Request(msgspec.Struct):
    request: _Named


class _Submit(msgspec.Struct, tag="Submit"):
    requests: list[_Request]


def request_ids(message: bytes) -> list[str]:
    """The requests of a `Submit` of which more cannot be read; none of anything else."""
    try:
        submit = msgspec.msgpack.decode(message, type=_Submit)
    except msgspec.DecodeError:
        return []
    return [request.request.request_id for request in submit.requests]
