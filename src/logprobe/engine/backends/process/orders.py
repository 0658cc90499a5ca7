"""What crosses the wall beside `transport.messages`: an engine process's start, its health and its weights.

Before it: `Replica`, on the front's side. After it: `child`, on the engine's, and back.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

# msgspec reads the annotations.
from logprobe.engine.protocol import Capabilities, EngineStats, Layout  # noqa: TC001
from logprobe.errors import LogprobeError  # noqa: TC001
from logprobe.transport.messages import Delta, Failure, FrontCommand


class LoadLora(msgspec.Struct, tag=True, frozen=True):
    """Load LoRA weights from a folder, to be known by a number that the front gives; answered."""

    number: int
    name: str
    path: str


class DropLora(msgspec.Struct, tag=True, frozen=True):
    """No request to come names these weights."""

    number: int


class LoadWeights(msgspec.Struct, tag=True, frozen=True):
    """Make other weights of the model ready, beside those that answer; answered."""

    number: int
    path: str  # a folder of safetensors files
    is_passing: bool  # the folder goes with the front
    loras: list[LoadLora]  # under the numbers that they have with these weights


class TakeWeights(msgspec.Struct, tag=True, frozen=True):
    """Run what comes from now on on weights that are ready; answered once they have taken over."""

    number: int
    of: int  # the number of their `LoadWeights`
    finishes: bool  # as `ReplaceForward` has it


class DropWeights(msgspec.Struct, tag=True, frozen=True):
    """Weights that are ready will not be taken."""

    of: int


class Start(msgspec.Struct, tag=True, frozen=True):
    """Load the model and serve; the first message."""

    settings: dict[str, Any]  # fields of `EngineConfig`
    loras: list[LoadLora]  # to be there from the beginning
    weights: LoadWeights | None = None  # in place of the model's own


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Let the step in progress end, and the process with it."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine takes requests."""

    capabilities: Capabilities
    eos_token_ids: list[int]


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start, or cannot go on."""

    error: LogprobeError


class Pulse(msgspec.Struct, tag=True, frozen=True):
    """A sign of life, several times a second."""

    stats: EngineStats
    stalled_s: float  # as `Front.stalled_s`


class Answer(msgspec.Struct, tag=True, frozen=True):
    """What became of an order that has a number."""

    number: int
    path: str = ""  # of LoRA weights, as they name it
    layout: Layout | None = None  # how the layers run, of other weights of the model
    error: LogprobeError | None = None


Asked: TypeAlias = LoadLora | LoadWeights | TakeWeights
Order: TypeAlias = Start | Stop | FrontCommand | Asked | DropLora | DropWeights
Report: TypeAlias = Delta | Failure | Ready | Stopped | Pulse | Answer
"""They come in lists: what a step found is one message."""


class _Named(msgspec.Struct):
    request_id: str


class _Request(msgspec.Struct):
    request: _Named


class _Submit(msgspec.Struct, tag="Submit"):
    requests: list[_Request]


def request_ids(message: bytes) -> list[str]:
    """The requests of a `Submit` of which more cannot be read; none of anything else."""
    try:
        found = msgspec.msgpack.decode(message, type=_Submit)
    except msgspec.DecodeError:
        return []
    return [one.request.request_id for one in found.requests]
