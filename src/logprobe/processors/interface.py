"""`LogitsProcessor`: the base class of rules that change the logits of requests that ask for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import msgspec
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.config import EngineConfig
    from logprobe.processors.batch import BatchRow, BatchState
    from logprobe.records.values import TokenTable


class TokenizerView(Protocol):
    """The parts of a model's tokenizer that processors read."""

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""

    @property
    def vocabulary(self) -> TokenTable:
        """The exact bytes of every id."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the EOS token; None if there is none."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are not text."""

    def plain_ids(self, text: str) -> list[int]:
        """Encode a text; special tokens in it are parsed, none are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Properties of the model that are available to processors."""

    vocab_size: int  # width of a row of logits; may exceed the tokenizer's
    eos_token_ids: frozenset[int]
    text: TokenizerView

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, loaded on first access."""
        return self.text.tokenizer

    @property
    def vocabulary(self) -> TokenTable:
        """The exact bytes of every token id."""
        return self.text.vocabulary

    def encode(self, text: str) -> list[int]:
        """Encode a text; special tokens in it are parsed, none are added."""
        return self.text.plain_ids(text)


class OverruledError(ValueError):
    """A token that a processor had masked was drawn, since a later processor unmasked it."""


@dataclass(slots=True)
class ProcessorCounter:
    """Totals of one processor since the engine started."""

    num_steps: int = 0  # steps with at least one row for it
    num_rows: int = 0  # rows passed to it
    num_failures: int = 0  # samples that it failed
    seconds: float = 0.0  # wall time in update_state and apply

    def __add__(self, other: ProcessorCounter) -> ProcessorCounter:
        return ProcessorCounter(
            self.num_steps + other.num_steps,
            self.num_rows + other.num_rows,
            self.num_failures + other.num_failures,
            self.seconds + other.seconds,
        )


class LogitsProcessor(ABC):
    """Base class of logits processors; only rows of requests that give its arguments are passed to it.

    One instance serves all requests. State about a request must be derivable from the request's own row
    (arguments, prompt, tokens observed), because a preempted request resumes with all its tokens at once.
    `Args` declares typed arguments (its fields are keys of `logits_processors_args`); `arg_names` only their
    names. A processor with neither runs on requests that give a key that no other registered processor has.
    """

    Args: ClassVar[type[msgspec.Struct] | None] = None
    arg_names: ClassVar[
        tuple[str, ...]
    ] = ()  # argument keys of a processor without `Args`; values are passed unchanged
    applies_to_all: ClassVar[bool] = False  # also run, with defaults, on requests without its arguments
    # True if it has state across steps. Otherwise it may get several rows of a sample, one per draft token.
    keeps_state: ClassVar[bool] = True
    # True if it records rows for later reading. If `is_argmax_invariant`, it then still gets greedy rows, and
    # if it also applies to all requests, the prompts of one call are processed in one step.
    keeps_rows: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, config: EngineConfig) -> None:
        """Create the single instance at engine start; `config` is passed only if the signature takes it."""

    def bind(self, model: ModelFacts) -> None:  # noqa: B027 - a processor that needs no model has nothing to do
        """Receive the model's facts; called once, after `__init__`."""

    def check_args(self, args: Any) -> None:  # noqa: B027 - most processors only need types and bounds
        """Raise `ValueError` if arguments of valid types can never be served; called from any thread."""

    def is_argmax_invariant(self) -> bool:
        """Return True if the argmax never changes; greedy rows then skip it, unless `keeps_rows`."""
        return False

    def update_state(self, batch: BatchState) -> None:  # noqa: B027 - a stateless rule has nothing to do
        """Receive the rows of the next logits, in order; called before each forward pass."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Change (rows, V) float32 logits, in place or not, and return them; must not change the state."""


class MaskLogitsProcessor(LogitsProcessor):
    """A built-in that only masks tokens."""

    @abstractmethod
    def forbid(self, row: BatchRow, possible: NDArray[np.bool_]) -> None:
        """Set the tokens masked for a row to False in `possible`, (V,) bool; thread-safe, needs no batch."""
