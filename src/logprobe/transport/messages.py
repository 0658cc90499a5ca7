"""Messages between the front and an engine: commands to the engine, and events of requests to the front.

The thread backend passes these objects by reference, the process backend as bytes (`channel`). The sender
must not modify a message after sending it.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

# These names must exist at run time, since msgspec reads the annotations to encode messages.
from logprobe.errors import LogprobeError  # noqa: TC001
from logprobe.processors.effects import ProcessorEffect  # noqa: TC001
from logprobe.records.rows import HostRows  # noqa: TC001
from logprobe.records.store.columns import Array  # noqa: TC001
from logprobe.records.values import IntArray  # noqa: TC001
from logprobe.sampling import SamplingParams  # noqa: TC001

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
PausedBy: TypeAlias = Literal["caller", "reader"]


class Lens(msgspec.Struct, frozen=True):
    """Logit lens: log-probabilities after each prompt token, computed from the states of inner layers."""

    layers: tuple[int, ...]  # as in `SamplingParams.return_hidden_states`
    k: int  # alternatives per layer and token


class Request(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One prompt and its parameters."""

    request_id: str
    prompt_token_ids: IntArray  # (num_prompt_tokens,) int32
    params: SamplingParams
    first_scored: int = 1  # first prompt position whose logprobs are returned (position 0 has none)
    wants_row: bool = False  # return the whole next-token distribution instead of sampling a token
    forced_token_ids: IntArray | None = None  # (max_tokens,) int32, used instead of sampled tokens
    # id of the API call that submitted the request; the scheduler shares the engine fairly among calls
    call: str = ""
    caller: str = ""  # id of the client, if known; the engine is shared among clients first, then among calls
    # parameters with which prompt rows are processed; None for raw rows
    scored_as: SamplingParams | None = None
    lens: Lens | None = None  # predictions from inner layers to report; None: none


class Admitted(msgspec.Struct, frozen=True, eq=False):
    """A request that passed validation, with the results of the validation."""

    request: Request
    processor_args: dict[int, Any]  # stage index in the processor pipeline → typed arguments
    lora_number: int = 0  # load number of the LoRA adapter at admission; 0 for none
    weights_number: int = 0  # load number of the model's weights at admission
    admitted_s: float = 0.0  # time of admission on the machine's monotonic clock


class Submit(msgspec.Struct, tag=True, frozen=True, eq=False):
    """Queue requests; they run in the same step if they fit."""

    requests: tuple[Admitted, ...]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Abort a request."""

    request_id: str


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Pause a request and keep its state."""

    request_id: str
    by: PausedBy = "caller"


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Undo the pause by `by`; the request continues once no pause is left."""

    request_id: str
    by: PausedBy = "caller"


class ForgetPrefixes(msgspec.Struct, tag=True, frozen=True):
    """Clear the prefix cache, except prefixes that running requests use."""


class LoadLora(msgspec.Struct, tag=True, frozen=True):
    """Load a LoRA adapter from a folder and reply; requests refer to the adapter by `number`."""

    number: int
    name: str
    path: str
    is_passing: bool = False  # True for a temporary folder, which the engine removes if the front dies


class DropLora(msgspec.Struct, tag=True, frozen=True):
    """Free a LoRA adapter that no request uses or will use."""

    number: int


class LoadWeights(msgspec.Struct, tag=True, frozen=True, eq=False):
    """Load new weights for the model, while the current ones stay in use, and reply with their layout."""

    number: int
    weights: Any  # tensors by name, or a folder with safetensors files
    is_passing: bool = False  # temporary folder; the engine process removes it if the front dies


class TakeWeights(msgspec.Struct, tag=True, frozen=True):
    """Switch to weights that were loaded, clear all caches, and reply.

    If `finishes`, running requests finish first, and new ones wait meanwhile; otherwise running requests fail
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
    refusal: str | None = None  # reason why drafting was impossible; None if it was possible
    # drafted and accepted tokens by their place among the drafts of a step, from 0
    drafted_by_position: list[int] = []
    accepted_by_position: list[int] = []

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of one step, of which the first `num_accepted` were accepted."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        add_counts(self.drafted_by_position, num_drafted)
        add_counts(self.accepted_by_position, num_accepted)


def add_counts(counts: list[int], num: int) -> None:
    """Add 1 to each of the first `num` counts; missing counts are appended."""
    counts += [0] * (num - len(counts))
    for place in range(num):
        counts[place] += 1


class Finish(msgspec.Struct, frozen=True, eq=False):
    """How a completion ended."""

    reason: FinishReason
    stop_reason: int | str | None = None  # the stop string or token id that ended the completion
    num_text_bytes: int | None = None  # length of a text that was cut at a stop string; None if not cut
    error: LogprobeError | None = None


class Delta(msgspec.Struct, tag=True, kw_only=True, eq=False, omit_defaults=True):
    """Output of one step for one completion of a request."""

    request_id: str
    index: int  # index of the completion
    token_ids: list[int] = []  # sampled in this step
    raw: HostRows | None = None  # one row per token; None if not requested
    processed: HostRows | None = None
    prompt: HostRows | None = None  # rows for the next prompt positions
    effects: list[list[ProcessorEffect]] | None = None  # processor effects per token; None if not requested
    row: Array | None = None  # (vocab_size,) float32, nats, read-only; set for `wants_row`
    hidden: Array | None = None  # (new tokens, layers * hidden size) float32; None: not requested
    prompt_hidden: Array | None = None  # the same for the next prompt tokens
    # (new tokens * expert layers, experts per token) uint8 or uint16; None: not requested
    routes: Array | None = None
    prompt_routes: Array | None = None  # the same for the next prompt tokens
    lens: list[HostRows] | None = None  # by layer of `Request.lens`, for the next prompt tokens
    finish: Finish | None = None  # None while the completion runs
    # counts for the whole completion, set with `finish`; None if drafting is off
    drafts: Drafts | None = None
    # prompt tokens from the prefix cache, set with `finish`; None if unknown
    num_cached_tokens: int | None = None
    weights_number: int = 0  # load number of the model's weights that the completion runs with


class Failure(msgspec.Struct, tag=True, frozen=True, eq=False):
    """The engine failed to run a request."""

    request_id: str
    error: LogprobeError


Event: TypeAlias = Delta | Failure
"""Event that the engine publishes for a request."""
