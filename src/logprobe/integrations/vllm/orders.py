"""Messages between the front end and `WorkerDraw` in vLLM's workers, sent as bytes through vLLM."""

from __future__ import annotations

from typing import Final

import msgspec

# These names must exist at run time, since msgspec reads the annotations.
from logprobe.processors.interface import ProcessorCounter  # noqa: TC001
from logprobe.transport.codec import Codec
from logprobe.transport.messages import Admitted, Delta  # noqa: TC001

# Keys of a request's `extra_args`.
TAG: Final = "logprobe_tag"  # name of the sample, which does not change when the sample is paused and resumed
WORK: Final = "logprobe_work"  # an encoded `Work`
BEFORE: Final = "logprobe_before"  # number of the sample's tokens in vLLM's prompt
SETTINGS: Final = "logprobe"  # key in vLLM's `additional_config`: settings of `WorkerDraw`
FORMAT: Final = "logprobe"  # vLLM's `load_format` for `worker.SourceLoader`


class Work(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sample to generate."""

    admitted: Admitted
    index: int  # index of the sample within its request
    number: int  # number of the request, counted by the engine


class Ask(msgspec.Struct, frozen=True):
    """Fetch the new results of samples, and remove other samples."""

    num_seen: dict[str, int]  # tag → number of the sample's tokens in vLLM's outputs so far
    forget: list[str] = []


class Answer(msgspec.Struct, frozen=True, eq=False):
    """The results since the last answer: deltas by tag, and totals by processor."""

    deltas: dict[str, list[Delta]]
    processors: dict[str, ProcessorCounter]


WORKS: Final[Codec[Work]] = Codec(Work)
ASKS: Final[Codec[Ask]] = Codec(Ask)
ANSWERS: Final[Codec[Answer]] = Codec(Answer)
