"""Messages between the front and an engine: commands to the engine, and request events back.

The thread backend passes these objects by reference, the process backend as bytes (`channel`). The sender
must not modify a message after sending it.
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
    """One prompt and its parameters."""

    request_id: str
    prompt_token_ids: IntArray  # (num_prompt_tokens,) int32
    params: SamplingParams
    first_scored: int = 1  # first prompt position whose logprobs are returned (position 0 has none)
    wants_row: bool = False  # return the whole next-token distribution instead of sampling a token
    forced_token_ids: IntArray | None = None  # (max_tokens,) int32: used instead of the sampled tokens
    call: str = ""  # id of the call that submitted it; the scheduler divides the engine fairly among calls
    caller: str = ""  # id of the client, if known; the engine is divided among clients before calls
    scored_as: SamplingParams | None = None  # prompt rows are processed by these; None: raw


class Admitted(msgspec.Struct, frozen=True, eq=False):
    """A request that passed validation, with the results of the validation."""

    request: Request
    processor_args: dict[int, Any]  # stage of the processor pipeline → its typed arguments
    lora_number: int = 0  # load number of its LoRA weights at admission; 0: none
    weights_number: int = 0  # load number of the model's weights at admission
    admitted_s: float = 0.0  # time of admission, monotonic clock of the machine


class Submit(msgspec.Struct, tag=True, frozen=True, eq=False):
    """Queue requests; they enter the same step if they fit."""

    requests: tuple[Admitted, ...]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Abort a request."""

    request_id: str


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Pause a request; its state is kept."""

    request_id: str
    by: PausedBy = "caller"


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Undo a pause; the request continues once nobody pauses it."""

    request_id: str
    by: PausedBy = "caller"


class ForgetPrefixes(msgspec.Struct, tag=True, frozen=True):
    """Clear the prefix cache, except prefixes that running requests use."""


class LoadLora(msgspec.Struct, tag=True, frozen=True):
    """Load LoRA weights from a folder and reply; requests refer to them by `number`."""

    number: int
    name: str
    path: str
    is_passing: bool = False  # temporary folder; the engine process removes it if the front dies


class DropLora(msgspec.Struct, tag=True, frozen=True):
    """Free LoRA weights that no request uses or will use."""

    number: int


class LoadWeights(msgspec.Struct, tag=True, frozen=True, eq=False):
    """Load new weights of the model next to the current ones and reply with their layout."""

    number: int
    weights: Any  # tensors by name, or the folder of their safetensors files
    is_passing: bool = False  # temporary folder; the engine process removes it if the front dies


class TakeWeights(msgspec.Struct, tag=True, frozen=True):
    """Switch to weights that were loaded, clear all caches, and reply.

    Running requests finish first if `finishes`, and new ones wait meanwhile; otherwise running requests fail
    with `WeightsReplacedError`.
    """

    number: int
    finishes: bool


class DropWeights(msgspec.Struct, tag=True, frozen=True):
    """Free weights that were loaded and will not be used."""

    number: int


Command: TypeAlias = Submit | Abort | Pause | Resume | ForgetPrefixes | DropLora | DropWeights
Asked: TypeAlias = LoadLora | LoadWeights | TakeWeights
"""Commands with exactly one reply."""


class Drafts(msgspec.Struct, omit_defaults=True):
    """Speculative decoding counts of one completion."""

    num_drafted: int = 0
    num_accepted: int = 0
    refusal: str | None = None  # why nothing can be drafted; None: drafting was possible


class Finish(msgspec.Struct, frozen=True, eq=False):
    """Why a completion ended."""

    reason: FinishReason
    stop_reason: int | str | None = None  # the stop string or token id that ended it
    num_text_bytes: int | None = None  # length of the text truncated at a stop string; None: not truncated
    error: LogprobeError | None = None


class Delta(msgspec.Struct, tag=True, kw_only=True, eq=False, omit_defaults=True):
    """Output of one step for one completion of a request."""

    request_id: str
    index: int  # index of the completion
    token_ids: list[int] = []  # sampled in this step
    raw: HostRows | None = None  # one row per token; None: not requested
    processed: HostRows | None = None
    prompt: HostRows | None = None  # rows of the next prompt positions
    effects: list[list[ProcessorEffect]] | None = None  # processor effects per token; None: not requested
    row: Array | None = None  # (vocabulary,) float32, nats, read-only; for `wants_row`
    finish: Finish | None = None  # None while the completion runs
    drafts: Drafts | None = None  # counts of the whole completion, with `finish`; None: drafting is off
    num_cached_tokens: int | None = None  # prompt tokens from the prefix cache, with `finish`; None: unknown
    weights_number: int = 0  # load number of the model's weights that run it


class Failure(msgspec.Struct, tag=True, frozen=True, eq=False):
    """The engine failed to run a request."""

    request_id: str
    error: LogprobeError


Event: TypeAlias = Delta | Failure
"""Event of a request, published by the engine."""
