"""What crosses the wall between front doors and an engine: requests one way, what is new of them the other.

A thread passes these objects by reference. Nothing in them is shared with the engine once they are sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    from logprobe.errors import LogprobeError
    from logprobe.processors import ProcessorEffect
    from logprobe.records import LogprobsLists
    from logprobe.records.store.columns import Array
    from logprobe.records.values import IntArray
    from logprobe.sampling import SamplingParams

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class Request(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One prompt and what is asked of it."""

    request_id: str
    prompt_token_ids: IntArray  # (num_prompt_tokens,) int32
    params: SamplingParams
    first_scored: int = 1  # the first prompt position whose logprobs are wanted (nothing predicts position 0)
    wants_row: bool = False  # end with the whole next-token distribution in place of a token

    @property
    def lora(self) -> str | None:
        """The LoRA weights that it runs on; None: the base model alone."""
        return self.params.lora


class NumberedLora(Protocol):
    """LoRA weights; each load has a number of its own, also where a name is loaded again."""

    @property
    def number(self) -> int:
        """Of the load."""


class Admitted(msgspec.Struct, frozen=True, eq=False):
    """A request that an engine has said yes to, with what it found out by the way."""

    request: Request
    processor_args: dict[int, Any]  # stage of the processors' pipeline → its typed arguments
    lora: NumberedLora | None = None  # what the name stood for then; held, so that it lasts as long


class Submit(msgspec.Struct, frozen=True, eq=False):
    """Take these in; they enter the same step where they fit."""

    requests: tuple[Admitted, ...]


class Abort(msgspec.Struct, frozen=True):
    """Give a request up."""

    request_id: str


class Pause(msgspec.Struct, frozen=True):
    """Let a request take no step; what it has computed stays."""

    request_id: str


class Resume(msgspec.Struct, frozen=True):
    """Let a paused request go on."""

    request_id: str


class AddLora(msgspec.Struct, frozen=True):
    """Load LoRA weights from a folder; may be handled on any thread."""

    name: str
    path: str


class RemoveLora(msgspec.Struct, frozen=True):
    """Refuse new requests for LoRA weights, which go once none runs on them; may be handled on any thread."""

    name: str


class ForgetPrefixes(msgspec.Struct, frozen=True):
    """Let go of every cached prefix that no request stands on."""


Command: TypeAlias = Submit | Abort | Pause | Resume | AddLora | RemoveLora | ForgetPrefixes


class Finish(msgspec.Struct, frozen=True, eq=False):
    """Why a completion ended."""

    reason: FinishReason
    stop_reason: int | str | None = None  # the stop string or token id that ended it
    num_text_bytes: int | None = None  # where a stop string cut the text; None: not cut
    error: LogprobeError | None = None


class Delta(msgspec.Struct, kw_only=True, eq=False):
    """What one step found for one completion of a request."""

    request_id: str
    index: int  # of the completion
    token_ids: list[int] = []  # drawn
    raw: LogprobsLists | None = None  # a row for each of them; None where none were asked
    processed: LogprobsLists | None = None
    prompt: LogprobsLists | None = None  # rows of the next prompt positions
    effects: list[ProcessorEffect] | None = None  # of the processors on the token; None where not asked
    row: Array | None = None  # (vocabulary,) float32, nats, read-only: the distribution in place of a token
    finish: Finish | None = None  # None while it goes on


class Failure(msgspec.Struct, frozen=True, eq=False):
    """The engine cannot go on with a request."""

    request_id: str
    error: LogprobeError


News: TypeAlias = Delta | Failure
