"""What crosses the wall between front doors and an engine: requests one way, what is new of them the other.

A thread passes these objects by reference, a process as bytes (`channel`). Nothing in them is shared with the
engine once they are sent.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

# msgspec reads the annotations when messages cross to another process.
from logprobe.errors import LogprobeError  # noqa: TC001
from logprobe.processors.effects import ProcessorEffect  # noqa: TC001
from logprobe.records.rows import HostRows  # noqa: TC001
from logprobe.records.store.columns import Array  # noqa: TC001
from logprobe.records.values import IntArray  # noqa: TC001
from logprobe.sampling import SamplingParams  # noqa: TC001

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
PausedBy: TypeAlias = Literal["caller", "reader"]


class Request(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One prompt and what is asked of it."""

    request_id: str
    prompt_token_ids: IntArray  # (num_prompt_tokens,) int32
    params: SamplingParams
    first_scored: int = 1  # the first prompt position whose logprobs are wanted (nothing predicts position 0)
    wants_row: bool = False  # end with the whole next-token distribution in place of a token
    forced_token_ids: IntArray | None = None  # (max_tokens,) int32: taken in place of what would be drawn
    call: str = ""  # what was asked at once: calls share the engine, whatever each of them asks
    caller: str = ""  # who asks, where a front door tells its callers apart: they share it before calls do
    scored_as: SamplingParams | None = None  # prompt rows are of what these draw from; None: the model's own


class Admitted(msgspec.Struct, frozen=True, eq=False):
    """A request that an engine has said yes to, with what the check of it gave."""

    request: Request
    processor_args: dict[int, Any]  # stage of the processors' pipeline → its typed arguments
    lora_number: int = 0  # which load of the LoRA weights that it names answered then; 0: it names none
    weights_number: int = 0  # which load of the model's weights answered then
    admitted_s: float = 0.0  # when that was, by the machine's monotonic clock


class Submit(msgspec.Struct, tag=True, frozen=True, eq=False):
    """Take these in; they enter the same step where they fit."""

    requests: tuple[Admitted, ...]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Give a request up."""

    request_id: str


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Let a request take no step; what it has computed stays."""

    request_id: str
    by: PausedBy = "caller"


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Let a paused request go on, once all who paused it have said so."""

    request_id: str
    by: PausedBy = "caller"


class ForgetPrefixes(msgspec.Struct, tag=True, frozen=True):
    """Let go of every cached prefix that no request stands on."""


class LoadLora(msgspec.Struct, tag=True, frozen=True):
    """Load LoRA weights from a folder; answered. Requests name them by this number."""

    number: int
    name: str
    path: str
    is_passing: bool = False  # the folder goes with the front


class DropLora(msgspec.Struct, tag=True, frozen=True):
    """No request names these weights any more, nor will one."""

    number: int


class LoadWeights(msgspec.Struct, tag=True, frozen=True, eq=False):
    """Make other weights of the model ready, beside those that answer; answered with their layout."""

    number: int
    weights: Any  # by name, or the folder of their safetensors files
    is_passing: bool = False  # the folder goes with the front


class TakeWeights(msgspec.Struct, tag=True, frozen=True):
    """Run what comes from now on on weights that are ready; answered once they have taken over.

    What runs is ended by `WeightsReplacedError`, or finishes first, and what comes meanwhile waits. No cache
    outlives the old ones.
    """

    number: int
    finishes: bool


class DropWeights(msgspec.Struct, tag=True, frozen=True):
    """Weights that are ready will not be taken."""

    number: int


Command: TypeAlias = Submit | Abort | Pause | Resume | ForgetPrefixes | DropLora | DropWeights
Asked: TypeAlias = LoadLora | LoadWeights | TakeWeights
"""Commands that are answered, once."""


class Drafts(msgspec.Struct, omit_defaults=True):
    """What became of one completion's drafts: tokens that the engine guessed and verified."""

    num_drafted: int = 0
    num_accepted: int = 0
    refusal: str | None = None  # why nothing was drafted; None: it could have been


class Finish(msgspec.Struct, frozen=True, eq=False):
    """Why a completion ended."""

    reason: FinishReason
    stop_reason: int | str | None = None  # the stop string or token id that ended it
    num_text_bytes: int | None = None  # where a stop string cut the text; None: not cut
    error: LogprobeError | None = None


class Delta(msgspec.Struct, tag=True, kw_only=True, eq=False, omit_defaults=True):
    """What one step gave one completion of a request."""

    request_id: str
    index: int  # of the completion
    token_ids: list[int] = []  # drawn
    raw: HostRows | None = None  # a row for each of them; None where none were asked
    processed: HostRows | None = None
    prompt: HostRows | None = None  # rows of the next prompt positions
    effects: list[list[ProcessorEffect]] | None = None  # of the processors on each; None where not asked
    row: Array | None = None  # (vocabulary,) float32, nats, read-only: the distribution in place of a token
    finish: Finish | None = None  # None while it goes on
    drafts: Drafts | None = None  # of the whole completion, at its end; None: the engine drafts nothing
    num_cached_tokens: int | None = None  # prompt tokens from the prefix cache, at its end; None: not known
    weights_number: int = 0  # which load of the model's weights runs it


class Failure(msgspec.Struct, tag=True, frozen=True, eq=False):
    """The engine cannot go on with a request."""

    request_id: str
    error: LogprobeError


Event: TypeAlias = Delta | Failure
"""What an engine publishes of a request."""
