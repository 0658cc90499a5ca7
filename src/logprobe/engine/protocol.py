"""Interfaces of the engine: `Core`, called by `Front`, and `ForwardBackend`, called by the engine step.

`LLM` and the server use an engine only through `Front`, which delegates to a `Core`. The native engine's core
runs a scheduler over a `ForwardBackend`; an engine with its own scheduler implements only `Core`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from logprobe._version import __version__
from logprobe.engine.durations import Durations
from logprobe.processors.interface import ProcessorCounter
from logprobe.records import LogprobsInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from logprobe.config import EngineConfig
    from logprobe.errors import LogprobeError
    from logprobe.kernels.arrays import Array
    from logprobe.models.loading import State
    from logprobe.models.lora import LoraWeights
    from logprobe.records.values import IntArray
    from logprobe.transport.messages import Admitted, Asked, Command, Event, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an engine runs a model's layers, and how it was verified against the reference model at load.

    Every load of the same weights gives the same layout.
    """

    weights: str
    arithmetic: str | None = None  # of matrix products with weights; see `LogprobsInfo.arithmetic`
    num_layers: int
    why_transformers: str | None  # why the transformers decoder is used; None: the native decoder is used
    rope_boundary: int | None  # sequence length in tokens above which the long rotary frequencies apply
    probe_difference: float  # nats; largest difference from the reference in the check at load time
    verified_against: str  # the reference of that check; see `LogprobsInfo.verified_against`
    kv_dtype: str = "float32"  # of the KV cache

    @property
    def layers(self) -> str:
        """Describe the layers, for example `30 by the native decoder`."""
        if self.why_transformers is None:
            cache = "" if self.kv_dtype == "float32" else f", {self.kv_dtype} keys and values"
            return f"{self.num_layers} by the native decoder{cache}"
        return f"{self.num_layers} by the transformers decoder: {self.why_transformers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model's layers, and which of their activations a backend can report."""

    hidden_size: int
    num_layers: int
    weight_bytes: int = 0  # of matrices in memory; 0: unknown
    why_no_layers: str | None = None  # why hidden states of inner layers are not reported; None: they are
    num_expert_layers: int = 0  # layers with routed experts
    num_experts: int = 0  # per such layer
    experts_per_token: int = 0  # per such layer
    why_no_routes: str | None = "the model has no experts"  # None: expert routes are reported


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Properties and limits of an engine; they change only when its weights are replaced."""

    engine: str
    model: str
    device: str
    dtype: str
    weights: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and completion together
    num_slots: int  # KV cache size, tokens
    max_num_batched_tokens: int
    max_num_seqs: int
    prompt_logprobs_with_prefix_cache: bool
    stages: tuple[str, ...]
    layout: Layout | None = None  # how the layers run
    num_processes: int = 0  # engine processes, each with its own KV cache; 0: runs in this process
    speculate: bool = False  # draft tokens and verify several in one step
    draft_model: str | None = None  # model that drafts tokens; None: they are drafted from repeated text
    weight_version: str | None = None  # see `LogprobsInfo.weight_version`
    quantization: str | None = None  # of the checkpoint, such as `Q4_1`; None: not quantized
    shape: ModelShape | None = None  # None: the engine reports no activations

    def of_weights(self, layout: Layout, version: str) -> Capabilities:
        """Return a copy that describes new weights, of this layout and version."""
        return replace(self, weights=layout.weights, layout=layout, weight_version=version, quantization=None)

    def source(self) -> LogprobsInfo:
        """Return the provenance fields that records store in their `LogprobsInfo`."""
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
            verified_against=self.layout.verified_against,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Current state and cumulative counters of an engine."""

    waiting: int
    running: int
    paused: int  # number of waiting and running samples that are paused
    free_slots: int
    cached_tokens: int  # prompt tokens served from the prefix cache
    preempted: int
    pauses: int  # times a request was paused because its reader was too slow
    seconds: dict[str, float]  # by step phase
    processors: dict[str, ProcessorCounter]  # by logits processor name
    drafted_tokens: int = 0  # proposed by speculative decoding
    accepted_tokens: int = 0  # draft tokens that were accepted
    # The two counts above, by a draft's place (from 0) among the drafts of its step.
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    restarts: int = 0  # of engine processes
    is_up: bool = True  # accepts requests; with several replicas: at least one of them does
    # Why the engine does not accept requests or does not respond; with several replicas: each one's reason.
    why_down: str = ""
    durations: dict[str, Durations] = field(default_factory=dict)  # by name, such as `step`
    replicas: dict[str, EngineStats] = field(default_factory=dict)  # by name, if there are several

    @classmethod
    def of_replicas(cls, replicas: dict[str, EngineStats]) -> EngineStats:
        """Aggregate the statistics of replicas, given by name.

        The result's `replicas` is empty unless there is more than one.
        """
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
        drafted = zip_longest(*(part.drafted_by_position for part in parts), fillvalue=0)
        accepted = zip_longest(*(part.accepted_by_position for part in parts), fillvalue=0)
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in counts},
            drafted_by_position=[*map(sum, drafted)],
            accepted_by_position=[*map(sum, accepted)],
            seconds=dict(seconds),
            processors=processors,
            is_up=any(part.is_up for part in parts),
            why_down="; ".join(dict.fromkeys(part.why_down for part in parts if part.why_down)),
            durations=durations,
            replicas=replicas if len(replicas) > 1 else {},
        )


class Core(Protocol):
    """The computing side of an engine, driven by a `Front`; all methods are thread-safe."""

    def start(self, publish: Callable[[Iterable[Event]], None], end: Callable[[LogprobeError], None]) -> None:
        """Start serving.

        Args:
            publish: called with each batch of request events.
            end: called once, after the last event, with the reason why the core stopped, such as `close`.

        Every submitted request ends with a published event, or with `end`.
        """

    def admit(self, request: Request) -> Admitted:
        """Validate a request; `Front` then adds the load numbers of its model weights and LoRA weights.

        Raises:
            ParameterError: the request can never be served.
        """

    def send(self, command: Command) -> None:
        """Queue a command to run before the next step; commands for finished requests have no effect."""

    def ask(self, command: Asked) -> Layout | None:
        """Execute a command and wait until it is done; return the new weights' layout for `LoadWeights`.

        Commands that are sent afterwards see the effect. A command that fails changes nothing.

        Raises:
            LogprobeError: the command failed.
        """

    @property
    def is_busy(self) -> bool:
        """True while requests run or wait."""

    def capabilities(self) -> Capabilities:
        """Return the properties and limits of the engine with its initial weights."""

    def stats(self) -> EngineStats:
        """Return the current statistics."""

    def stalled_s(self, request_ids: Collection[str] = ()) -> float:
        """See `Front.stalled_s`."""

    def close(self) -> None:
        """End all requests and release the model; further calls have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Activations and expert routes that a step keeps for some of its tokens.

    `ForwardBackend.run` writes them. Hidden state 0 is the embedding, and hidden state n the output of layer
    n, as in transformers; the last one, after the final norm, is kept by slot (`hidden_rows`).
    """

    tokens: IntArray  # (N,) indices in `StepBatch.token_ids`
    rows: IntArray  # (N,) the tokens' rows in `hidden`, `routes` and `given`
    layers: tuple[int, ...]  # ascending numbers of the hidden states to keep
    hidden: Array  # (rows, len(layers), hidden size) float32
    routes: Array | None = None  # (rows, expert layers, experts per token) int32: experts of each token
    given: Array | None = None  # the same shape: experts to use; -1: those that the router chooses
    errors: list[LogprobeError] = field(default_factory=list)  # why nothing was kept; empty: no error

    def keep(self, layer: int, hidden: Array) -> None:
        """Keep hidden state `layer` of all tokens in the step, (num_tokens, hidden size)."""
        self.hidden[self.rows, self.layers.index(layer)] = hidden[self.tokens]

    def route(self, place: int, chosen: Array) -> Array:
        """Return the experts to use for all tokens in the step, (num_tokens, experts per token).

        If `routes` is set, the experts of the tokens in `tokens` are written to it.

        Args:
            place: index of the layer among the layers with experts.
            chosen: the experts that the router chose, of the same shape.
        """
        if self.given is not None:
            given = self.given[self.rows, place]
            is_given = given[:, 0] >= 0
            chosen = chosen.copy()
            chosen[self.tokens[is_given]] = given[is_given]
        if self.routes is not None:
            self.routes[self.rows, place] = chosen[self.tokens]
        return chosen

    def only(self, is_kept: NDArray[np.bool_]) -> Capture:
        """Return the capture for a batch with only the tokens for which `is_kept` (num_tokens,) is True."""
        own = is_kept[self.tokens]
        tokens = (np.cumsum(is_kept) - 1)[self.tokens[own]].astype(np.int32)
        return replace(self, tokens=tokens, rows=self.rows[own])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The tokens of one step as flat arrays, grouped in spans: each span holds new tokens of one sample."""

    token_ids: IntArray  # (num_tokens,) int32
    positions: IntArray  # (num_tokens,) int32, position in the sample
    slots: IntArray  # (num_tokens,) int32, unique KV cache slots
    starts: IntArray  # (num_spans + 1,) int32: span s holds tokens [starts[s], starts[s + 1])
    context_slots: Sequence[IntArray]  # num_spans x (context length,) int32; the span's own slots come last
    loras: Sequence[LoraWeights | None]  # num_spans; None: no LoRA
    draw_slots: IntArray  # (num_rows,) int32: slots of the tokens after which a token is sampled
    are_long: Sequence[bool]  # num_spans: True if the span uses the model's long rotary frequencies
    capture: Capture | None = None  # None: no request of the step asks for activations

    def only(self, *, is_long: bool) -> StepBatch:
        """Return a batch with only the spans whose `are_long` equals `is_long`."""
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
            capture=None if self.capture is None else self.capture.only(tokens),
        )

    def span(self, index: int) -> slice:
        """Return the range of indices in `token_ids` that span `index` covers."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))


class ForwardBackend(Protocol):
    """Runs a step's packed tokens through a model; stores keys, values and final hidden states by slot."""

    vocab_size: int
    context_len: int
    num_slots: int
    dtype: Any  # of the logits computation; `str(dtype)` ends with its name
    rope_boundary: int | None  # sequence length in tokens above which the long rotary frequencies apply
    shape: ModelShape

    @property
    def layout(self) -> Layout | None:
        """How the layers run; None if the backend has no layers."""

    def load_lora(self, name: str, path: str, number: int) -> LoraWeights:
        """Load LoRA weights from a folder; they stay valid when the model's weights are replaced.

        May be called on any thread while `run` executes.
        """

    def make_room(self, lora: LoraWeights) -> None:
        """Prepare the model for steps with these LoRA weights; may be called while `run` executes."""

    def with_weights(self, config: EngineConfig, state: State) -> ForwardBackend:
        """Return a new backend for the same model with other weights; may be called while `run` executes.

        `state` maps parameter names to tensors, which are copied.
        """

    def run(self, batch: StepBatch) -> None:
        """Compute one step and fill its `capture`; each layer stores all keys and values, then reads them."""

    def hidden_rows(self, slots: IntArray) -> Any:
        """Return the final hidden states stored in `slots`, with shape (len(slots), hidden size).

        The states are an array on a CPU, and a tensor on a GPU.
        """

    def head(self, hidden: Any, lora: LoraWeights | None = None) -> Any:
        """Return float32 logits (rows, vocabulary) of hidden states (rows, hidden size).

        `lora` applies to all rows. The logits are an array on a CPU, and a tensor on a GPU.
        """

    def normed(self, hidden: Array) -> Any:
        """Apply the model's final norm to an inner layer's float32 hidden states (rows, hidden size).

        Returns states for `head`.

        Raises:
            UnsupportedModelError: the model's final norm is unknown.
        """

    def close(self) -> None:
        """Release weights and KV cache; the backend cannot be used afterwards."""
