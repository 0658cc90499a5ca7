"""The seams of the engine: what stands behind a `Front`, and what the scheduler drives.

`Front` is all that `LLM`, the async front door and a server know of an engine; behind it is a `Core`. The
native engine's core has a scheduler over a `ForwardBackend`; an engine with a scheduler of its own is a
`Core` alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from logprobe._version import __version__
from logprobe.engine.durations import Durations
from logprobe.processors.interface import ProcessorCounter
from logprobe.records import LogprobsInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import torch

    from logprobe.config import EngineConfig
    from logprobe.errors import LogprobeError
    from logprobe.models.loading import State
    from logprobe.models.lora import LoraWeights
    from logprobe.records.values import IntArray
    from logprobe.transport.messages import Admitted, Asked, Command, Event, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model's layers run, and how near to transformers' numbers they are; the same at every load."""

    weights: str
    arithmetic: str | None = None  # of products with weights, as `LogprobsInfo` has it
    num_layers: int
    why_transformers: str | None  # why the transformers decoder runs it; None: a native decoder does
    rope_boundary: int | None  # tokens above which a text runs under other rotary frequencies
    probe_difference: float  # largest at load, nats
    kv_dtype: str = "float32"  # of cached keys and values

    @property
    def layers(self) -> str:
        """Such as `30 by the native decoder`."""
        if self.why_transformers is None:
            cache = "" if self.kv_dtype == "float32" else f", {self.kv_dtype} keys and values"
            return f"{self.num_layers} by the native decoder{cache}"
        return f"{self.num_layers} by the transformers decoder: {self.why_transformers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do, and within which limits."""

    engine: str
    model: str
    device: str
    dtype: str
    weights: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and completion together
    num_slots: int  # tokens that the key/value pool holds
    max_batch_tokens: int
    max_batch_rows: int
    prompt_logprobs_with_prefix_cache: bool
    stages: tuple[str, ...]
    layout: Layout | None = None  # how the layers run
    num_processes: int = 0  # of its own, each with such a pool; 0: it runs in this process
    speculate: bool = False  # whether it drafts tokens of repeated text and verifies several in one step
    weight_version: str | None = None  # which weights answer, as `LogprobsInfo` has it
    quantization: str | None = None  # of the checkpoint, such as `Q4_1`; None: its weights are not quantised

    def of_weights(self, layout: Layout, version: str) -> Capabilities:
        """The same with other weights."""
        return replace(self, weights=layout.weights, layout=layout, weight_version=version, quantization=None)

    def source(self) -> LogprobsInfo:
        """What records say of where their numbers come from."""
        source = LogprobsInfo(
            engine=self.engine,
            model=self.model,
            logits_dtype=self.dtype,
            weight_version=self.weight_version,
            quantization=self.quantization,
            logprobe_version=__version__,
        )
        if self.layout is None:
            return source
        return msgspec.structs.replace(
            source,
            weights=self.layout.weights,
            arithmetic=self.layout.arithmetic,
            layers=self.layout.layers,
            probe_difference=self.layout.probe_difference,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine is doing now, and has done since its start."""

    waiting: int
    running: int
    paused: int  # of those that wait or run
    free_slots: int
    cached_tokens: int  # prompt tokens that were known and not computed again
    preempted: int
    pauses: int  # times that a request was paused for its reader
    seconds: dict[str, float]  # by part of a step
    processors: dict[str, ProcessorCounter]  # by name of the logits processor
    drafted_tokens: int = 0  # guessed, and verified by the model
    accepted_tokens: int = 0  # of these, found right
    restarts: int = 0  # of its processes
    is_up: bool = True  # it takes requests; of several: one of them does
    why_down: str = ""  # why it takes none, or does not answer; of several: of each
    durations: dict[str, Durations] = field(default_factory=dict)  # by what took so long
    replicas: dict[str, EngineStats] = field(default_factory=dict)  # by name, where it has several

    @classmethod
    def of_replicas(cls, replicas: dict[str, EngineStats]) -> EngineStats:
        """The sums over several engines; those of a single one are its own."""
        counts = (
            "waiting",
            "running",
            "paused",
            "free_slots",
            "cached_tokens",
            "preempted",
            "pauses",
            "drafted_tokens",
            "accepted_tokens",
            "restarts",
        )
        parts = replicas.values()
        seconds: Counter[str] = Counter()
        processors: dict[str, ProcessorCounter] = {}
        durations: dict[str, Durations] = {}
        for part in parts:
            seconds.update(part.seconds)
            for name, lasted in part.durations.items():
                durations[name] = durations.get(name, Durations()) + lasted
            for name, counter in part.processors.items():
                processors[name] = processors.get(name, ProcessorCounter()) + counter
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in counts},
            seconds=dict(seconds),
            processors=processors,
            is_up=any(part.is_up for part in parts),
            why_down="; ".join(dict.fromkeys(part.why_down for part in parts if part.why_down)),
            durations=durations,
            replicas=replicas if len(replicas) > 1 else {},
        )


class Core(Protocol):
    """What computes behind a `Front`; all may be called on any thread."""

    def start(self, publish: Callable[[Iterable[Event]], None], end: Callable[[LogprobeError], None]) -> None:
        """Serve, from here on: `publish` takes what is new of requests, `end` why nothing more will follow.

        Every request that was sent ends by what is published, or else by `end`; `close` leads to it, too.
        """

    def admit(self, request: Request) -> Admitted:
        """Say yes to a request, or raise `ParameterError` where it can never be served, saying why.

        Which loads it runs on is the front's to say.
        """

    def send(self, command: Command) -> None:
        """Do this before the next step; what it says of a request that has ended is dropped."""

    def ask(self, command: Asked) -> Layout | None:
        """Do this, or nothing of it, and return once it is done; other weights give their layout.

        `LogprobeError` where it cannot be done. What requests are sent later finds it done.
        """

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait."""

    def capabilities(self) -> Capabilities:
        """What it can do with the weights that it was started with."""

    def stats(self) -> EngineStats:
        """What it is doing and has done."""

    def stalled_s(self, request_ids: Collection[str] = ()) -> float:
        """As `Front.stalled_s`."""

    def close(self) -> None:
        """End what runs and let the model go; a second call does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step's tokens as arrays, span after span: a span is a run of new tokens of one sample."""

    token_ids: IntArray  # (num_tokens,) int32
    positions: IntArray  # (num_tokens,) int32, in their samples
    slots: IntArray  # (num_tokens,) int32, each once
    starts: IntArray  # (num_spans + 1,) int32: span s holds tokens [starts[s], starts[s + 1])
    context_slots: Sequence[IntArray]  # num_spans x (context length,) int32; the last are the span's own
    loras: Sequence[LoraWeights | None]  # num_spans: the weights that each runs on
    draw_slots: IntArray  # (num_draws,) int32: the tokens after which one is drawn
    are_long: Sequence[bool]  # num_spans: whether each runs under the model's long rotary frequencies

    def only(self, *, is_long: bool) -> StepBatch:
        """The spans of one kind of rotary frequencies, as a step of their own."""
        spans = [index for index, own in enumerate(self.are_long) if own == is_long]
        if len(spans) == len(self.are_long):
            return self
        tokens = np.zeros(len(self.token_ids), dtype=bool)
        for index in spans:
            tokens[self.span(index)] = True
        lengths = np.diff(self.starts)[spans]
        return StepBatch(
            token_ids=self.token_ids[tokens],
            positions=self.positions[tokens],
            slots=self.slots[tokens],
            starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            context_slots=[self.context_slots[index] for index in spans],
            loras=[self.loras[index] for index in spans],
            draw_slots=self.draw_slots[np.isin(self.draw_slots, self.slots[tokens])],
            are_long=[is_long] * len(spans),
        )

    def span(self, index: int) -> slice:
        """The tokens of a span."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))


class ForwardBackend(Protocol):
    """Runs packed tokens through a model and keeps keys, values and hidden rows by slot."""

    vocab_size: int
    context_len: int
    num_slots: int
    dtype: torch.dtype  # that the logits are computed in
    rope_boundary: int | None  # tokens above which a text runs under other rotary frequencies throughout

    @property
    def layout(self) -> Layout | None:
        """How its layers run, where it has any."""

    def load_lora(self, name: str, path: str, number: int) -> LoraWeights:
        """LoRA weights of a folder, for this model or one of its shape; from any thread, beside `run`."""

    def make_room(self, lora: LoraWeights) -> None:
        """Let steps name such weights; from any thread, beside `run`."""

    def with_weights(self, config: EngineConfig, state: State) -> ForwardBackend:
        """The same model with other weights by name, which are copied; from any thread, beside `run`."""

    def run(self, batch: StepBatch) -> None:
        """Compute a step's tokens; all keys of a layer are stored before any is read."""

    def hidden_rows(self, slots: IntArray) -> torch.Tensor:
        """The last hidden states of the tokens in `slots`, (len(slots), hidden size)."""

    def head(self, hidden: torch.Tensor, lora: LoraWeights | None = None) -> torch.Tensor:
        """(rows, hidden size) → (rows, vocabulary) float32 logits, all under the same LoRA weights."""

    def close(self) -> None:
        """Let weights and slots go; nothing runs after it."""
