"""`LogitsProcessor`: a rule that changes logits for those requests that ask for it."""

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
    """A model's tokenizer, as an engine has it."""

    @property
    def tokenizer(self) -> Any:
        """As transformers has it."""

    @property
    def vocabulary(self) -> TokenTable:
        """The exact bytes of every id."""

    @property
    def eos_token_id(self) -> int | None:
        """What ends a text; None where there is no such token."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are no text."""

    def plain_ids(self, text: str) -> list[int]:
        """The token ids of a text, special tokens within it included, none added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a processor may know of the model that it works for."""

    vocab_size: int  # width of a row of logits
    eos_token_ids: frozenset[int]
    text: TokenizerView

    @property
    def tokenizer(self) -> Any:
        """The tokenizer as transformers has it, loaded when first asked for."""
        return self.text.tokenizer

    @property
    def vocabulary(self) -> TokenTable:
        """The exact bytes of every id of the tokenizer."""
        return self.text.vocabulary

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, special tokens within it included, none added."""
        return self.text.plain_ids(text)


class OverruledError(ValueError):
    """A token was drawn that a processor had made impossible: a later processor made it possible again."""


@dataclass(slots=True)
class ProcessorCounter:
    """One processor's totals since the engine's start."""

    num_steps: int = 0  # steps with a row for it
    num_rows: int = 0  # rows that it was given
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
    """Changes the rows of requests that give it arguments; the rows of others never reach it.

    One instance serves all requests. What it knows of a request must follow from the request's own row
    (arguments, prompt, tokens observed), because a paused request comes back with all its tokens at once.
    `Args` types the arguments (its fields are the keys of `logits_processors_args`), `arg_names` names them
    alone; a processor with neither runs on requests that give a key which no other registered one has.
    """

    Args: ClassVar[type[msgspec.Struct] | None] = None
    arg_names: ClassVar[
        tuple[str, ...]
    ] = ()  # keys of a processor without `Args`, which reach it as they are
    applies_to_all: ClassVar[bool] = False  # to requests without its arguments, too: defaults then
    # From step to step; one that does not may be given several rows of a sample, one for each of its drafts.
    keeps_state: ClassVar[bool] = True
    # For somebody to read. One that `is_argmax_invariant` then meets greedy rows, too, and where it applies
    # to all requests, the prompts of one call come in one step.
    keeps_rows: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, config: EngineConfig) -> None:
        """Make the one instance, at the engine's start; one that takes nothing is made without `config`."""

    def bind(self, model: ModelFacts) -> None:  # noqa: B027 - a processor that needs no model has nothing to do
        """Learn the model's facts, once, after `__init__`."""

    def check_args(self, args: Any) -> None:  # noqa: B027 - types and bounds say all for most processors
        """Raise `ValueError` where arguments of the right types can never be served; from any thread."""

    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token stays the same: greedy rows skip it then, unless it `keeps_rows`."""
        return False

    def update_state(self, batch: BatchState) -> None:  # noqa: B027 - a stateless rule has nothing to do
        """Learn the rows of the next logits, in their order; before each forward pass."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Change (rows, V) float32 logits, in place or not, and return them; never change the state."""


class MaskLogitsProcessor(LogitsProcessor):
    """A built-in that makes tokens impossible and does nothing else."""

    @abstractmethod
    def forbid(self, row: BatchRow, possible: NDArray[np.bool_]) -> None:
        """Set the tokens that a row may not draw to False in (V,) bool; from any thread, without a batch."""
