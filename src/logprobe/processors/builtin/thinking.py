"""`ThinkingBudgetLogitsProcessor`: ends a reasoning model's thinking after so many tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch

from logprobe.errors import require
from logprobe.processors.arguments import ThinkingBudgetArgs
from logprobe.processors.batch import BatchRow, BatchState, RowKey, as_batch
from logprobe.processors.interface import LogitsProcessor, ModelFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from logprobe.config import EngineConfig

Ids: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Markers:
    """What starts thinking, what ends it, and what is written before the end, all as token ids."""

    start: Ids
    end: Ids
    sentence: Ids = ()


@dataclass(slots=True)
class Thinking:
    """Where one sample stands; it follows from the tokens observed and nothing else."""

    markers: Markers
    budget: int
    is_on: bool = False
    num_thought: int = 0  # tokens since the start marker, those of the prompt apart
    forced: Ids = ()  # what is being written, token by token
    num_forced: int = 0
    num_observed: int = 0
    tail: list[int] = field(default_factory=list)  # the latest tokens, as many as the longest marker

    def read_prompt(self, prompt: Sequence[int]) -> None:
        """Find out whether the prompt leaves the model thinking; its tokens cost no budget."""
        for token_id in prompt:
            self._look(int(token_id))
        self._start_forcing()

    def observe(self, output: Sequence[int]) -> None:
        """Advance by the tokens that were not observed yet."""
        for token_id in output[self.num_observed :]:
            self._advance(token_id)
        self.num_observed = len(output)

    @property
    def next_forced(self) -> int | None:
        """The only token that may come next; None where the model is free."""
        return self.forced[self.num_forced] if self.num_forced < len(self.forced) else None

    def _advance(self, token_id: int) -> None:
        expected = self.next_forced
        if expected is not None:
            if token_id != expected:
                raise ValueError(
                    f"token {token_id} came where {expected} was forced; a later processor overruled it"
                )
            self.num_forced += 1
            if self.next_forced is None:
                self.is_on, self.forced, self.num_forced, self.tail = False, (), 0, []
            return
        was_on = self.is_on
        self._look(token_id)
        if self.is_on and was_on:
            self.num_thought += 1
        self._start_forcing()

    def _look(self, token_id: int) -> None:
        """Add a token to the tail and see whether it completes a marker."""
        longest = max(len(self.markers.start), len(self.markers.end))
        self.tail = [*self.tail, token_id][-longest:]
        awaited = self.markers.end if self.is_on else self.markers.start
        if tuple(self.tail[-len(awaited) :]) == awaited:
            self.is_on, self.num_thought, self.tail = not self.is_on, 0, []

    def _start_forcing(self) -> None:
        room = max(self.budget - len(self.markers.sentence), 0)
        if self.is_on and self.num_thought >= room:
            self.forced = self.markers.sentence + self.markers.end
            # Where the model has begun the end marker by itself, only its rest is written.
            self.num_forced = 0 if self.markers.sentence else self._num_begun()

    def _num_begun(self) -> int:
        end = self.markers.end
        sizes = range(min(len(end) - 1, len(self.tail)), 0, -1)
        return next((size for size in sizes if tuple(self.tail[-size:]) == end[:size]), 0)


@final
class ThinkingBudgetLogitsProcessor(LogitsProcessor):
    """Ends thinking after `thinking_budget` tokens by forcing `think_stop_sentence`, then the end marker.

    Thinking starts after the marker `think_start`, in the prompt or the completion; tokens of the prompt
    cost no budget, and the stop sentence is written within it. A forced token has logit 0.0 and every other
    one -inf. A second start marker starts a second round. Markers are found as the tokens that the model's
    tokenizer gives them alone; where the context changes those, give `..._token_ids`.
    """

    Args = ThinkingBudgetArgs

    def __init__(self, config: EngineConfig) -> None:
        del config
        self._encode: Callable[[str], Ids] = _no_tokenizer
        self._states: dict[RowKey, Thinking] = {}
        self._forced: list[tuple[int, int]] = []

    def bind(self, model: ModelFacts) -> None:
        """Learn how texts become tokens."""
        self._encode = lru_cache(maxsize=1024)(lambda text: tuple(model.encode(text)))

    def check_args(self, args: Any) -> None:
        """Refuse markers that cannot be found."""
        markers = self._markers(args)
        require(markers.start, "think_start", "has no tokens in this model's vocabulary")
        require(markers.end, "think_end", "has no tokens in this model's vocabulary")
        require(markers.start != markers.end, "think_end", "must differ from think_start")

    def update_state(self, batch: BatchState) -> None:
        """Observe new tokens and find the rows in which the next one is forced."""
        batch = as_batch(batch, ThinkingBudgetArgs)
        rows = [row for row in batch.rows if row.args.thinking_budget is not None]
        self._states = {row.key: self._state(row) for row in rows}
        for row in rows:
            self._states[row.key].observe(row.output_token_ids)
        forced = [
            (index, self._states[row.key].next_forced)
            for index, row in enumerate(batch.rows)
            if row.key in self._states
        ]
        self._forced = [(index, token_id) for index, token_id in forced if token_id is not None]

    def apply(self, logits: Tensor) -> Tensor:
        """Leave only the forced token of each row in which one is forced."""
        for index, token_id in self._forced:
            logits[index] = -torch.inf
            logits[index, token_id] = 0.0
        return logits

    def _state(self, row: BatchRow) -> Thinking:
        known = self._states.get(row.key)
        if known is not None and known.num_observed <= len(row.output_token_ids):
            return known
        state = Thinking(self._markers(row.args), row.args.thinking_budget)
        state.read_prompt(row.prompt_token_ids)
        return state

    def _markers(self, args: ThinkingBudgetArgs) -> Markers:
        def ids(token_ids: list[int], text: str | None) -> Ids:
            return tuple(token_ids) or (self._encode(text) if text else ())

        return Markers(
            ids(args.think_start_token_ids, args.think_start),
            ids(args.think_end_token_ids, args.think_end),
            ids(args.think_stop_sentence_token_ids, args.think_stop_sentence),
        )


def _no_tokenizer(text: str) -> Ids:
    raise AssertionError(f"bind comes before {text!r} is looked up")
