"""`LogitsProcessor`: the base class of processors, which change the logits of requests that ask for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import msgspec
    import numpy as np
    from numpy.typing import NDArray

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
        """Map from token id to text and exact bytes."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the EOS token; None if there is none."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of tokens that are not part of a text."""

    def plain_ids(self, text: str) -> list[int]:
        """Encode a text; special tokens in it are parsed, none are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Properties of the model that are available to processors."""

    vocab_size: int  # width of a row of logits; may exceed the tokenizer's vocabulary
    eos_token_ids: frozenset[int]
    text: TokenizerView

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, loaded on first access."""
        return self.text.tokenizer

    @property
    def vocabulary(self) -> TokenTable:
        """Map from token id to text and exact bytes."""
        return self.text.vocabulary

    def encode(self, text: str) -> list[int]:
        """Encode a text; special tokens in it are parsed, none are added."""
        return self.text.plain_ids(text)


class OverruledError(ValueError):
    """A token was sampled that a processor had masked, because a later processor unmasked it."""


@dataclass(slots=True)
class ProcessorCounter:
    """Totals of one processor since the engine started."""

    num_steps: int = 0  # steps with at least one row for the processor
    num_rows: int = 0  # rows passed to the processor
    num_failures: int = 0  # samples that failed because of the processor
    seconds: float = 0.0  # wall time in update_state and apply

    def __add__(self, other: ProcessorCounter) -> ProcessorCounter:
        return ProcessorCounter(
            self.num_steps + other.num_steps,
            self.num_rows + other.num_rows,
            self.num_failures + other.num_failures,
            self.seconds + other.seconds,
        )


class LogitsProcessor(ABC):
    """Base class of logits processors; a processor only gets rows of requests that set its arguments.

    One instance serves all requests. State about a request must be derivable from the request's row
    (arguments, prompt, output tokens), because a preempted request resumes as a new row with all its tokens.
    `Args` declares typed arguments: its fields are keys of `logits_processors_args`. `arg_names` declares
    only names. A processor with neither runs on requests that set a key which no other registered processor
    has.
    """

    Args: ClassVar[type[msgspec.Struct] | None] = None
    arg_names: ClassVar[
        tuple[str, ...]
    ] = ()  # names of the arguments of a processor without `Args`; values are passed unchanged
    # if True, also run, with default arguments, on requests without its arguments
    applies_to_all: ClassVar[bool] = False
    # True if the processor keeps state across steps. If False, a step may have several rows of a sample, one
    # per draft token.
    keeps_state: ClassVar[bool] = True
    # True if the processor records rows for later reading. It then gets greedy rows even if it is
    # argmax-invariant. If it also applies to all requests, the prompts of one call are processed in one step.
    keeps_rows: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, config: EngineConfig) -> None:
        """Create the only instance, at engine start; `config` is passed only if the signature has it."""

    def bind(self, model: ModelFacts) -> None:  # noqa: B027 - a processor that needs no model has nothing to do
        """Receive the model's properties; called once, after `__init__`."""

    def check_args(self, args: Any) -> None:  # noqa: B027 - most processors only need types and bounds
        """Raise `ValueError` if arguments of valid types have invalid values; any thread may call it."""

    def is_argmax_invariant(self) -> bool:
        """Return True if the argmax never changes; unless `keeps_rows`, greedy rows skip this processor."""
        return False

    def update_state(self, batch: BatchState) -> None:  # noqa: B027 - a stateless rule has nothing to do
        """Receive the rows of the next step, in the order of the logits; called before each forward pass."""

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """Return the changed logits, (rows, V) float32; must not change the processor's own state.

        `logits` may be modified in place and returned.

        `logits` is a NumPy array if the model runs on the CPU, and a torch tensor if it runs on a GPU. The
        result has the same type.
        """


class MaskLogitsProcessor(LogitsProcessor):
    """Base class of built-in processors that only mask tokens."""

    @abstractmethod
    def forbid(self, row: BatchRow, possible: NDArray[np.bool_]) -> None:
        """Set the tokens masked for `row` to False in `possible`, (V,) bool; thread-safe, uses no state."""
