"""What crosses between the front and the draw in vLLM's workers, as bytes in what vLLM carries anyway."""

from __future__ import annotations

from typing import Final

import msgspec

# msgspec reads the annotations.
from logprobe.processors.interface import ProcessorCounter  # noqa: TC001
from logprobe.transport.codec import Codec
from logprobe.transport.messages import Admitted, Delta  # noqa: TC001

# Keys of a request's `extra_args`.
TAG: Final = "logprobe_tag"  # the name of the sample, which it keeps when it is paused and goes on
WORK: Final = "logprobe_work"  # bytes of a `Work`
BEFORE: Final = "logprobe_before"  # tokens of the sample that stand in vLLM's prompt
SETTINGS: Final = "logprobe"  # of vLLM's `additional_config`: what a `WorkerDraw` is made of
FORMAT: Final = "logprobe"  # vLLM's `load_format` of weights that `worker.SourceLoader` reads


class Work(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sample to draw."""

    admitted: Admitted
    index: int  # of the sample in its request
    number: int  # of the request, counted by the engine


class Ask(msgspec.Struct, frozen=True):
    """Fetch what was found for some samples, and forget others."""

    num_seen: dict[str, int]  # tag → tokens of the sample that vLLM has let the front see
    forget: list[str] = []


class Answer(msgspec.Struct, frozen=True, eq=False):
    """What was found since the last answer."""

    deltas: dict[str, list[Delta]]
    processors: dict[str, ProcessorCounter]


WORKS: Final[Codec[Work]] = Codec(Work)
ASKS: Final[Codec[Ask]] = Codec(Ask)
ANSWERS: Final[Codec[Answer]] = Codec(Answer)
