"""`ThinkingBudgetLogitsProcessor`: ends a reasoning model's thinking after a given number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, final

from logprobe.errors import require
from logprobe.processors.arguments import ThinkingBudgetArgs
from logprobe.processors.batch import BatchRow, BatchState, RowKey, as_batch
from logprobe.processors.interface import LogitsProcessor, ModelFacts, OverruledError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.config import EngineConfig

Ids: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Marker:
    """A start or end marker, as a text, or as exact token ids if the request set those."""

    ids: Ids  # tokens to force; also the tokens to match if there is no text
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class Markers:
    """The start marker, the end marker, and the sentence to force before the end marker."""

    start: Marker
    end: Marker
    token_bytes: Callable[[int], bytes]
    sentence: Ids = ()


@dataclass(slots=True)
class Thinking:
    """State of one sample, which depends only on its prompt and output tokens."""

    markers: Markers
    budget: int
    is_on: bool = False
    num_thought: int = 0  # output tokens since the start marker
    forced: Ids = ()  # tokens to force
    num_forced: int = 0
    num_observed: int = 0
    tail: Ids = ()  # latest tokens since a marker, as many as the longest marker has
    tail_text: bytes = b""  # latest bytes since a marker, as many as the longest marker text has

    def read_prompt(self, prompt: Sequence[int]) -> None:
        """Determine if the sample is thinking after the prompt, whose tokens do not count."""
        for token_id in prompt:
            self._look(int(token_id))
        self._start_forcing()

    def observe(self, output: Sequence[int]) -> None:
        """Advance by the tokens in `output` that were not observed before."""
        for token_id in output[self.num_observed :]:
            self._advance(token_id)
        self.num_observed = len(output)

    @property
    def next_forced(self) -> int | None:
        """The only token that may come next; None if nothing is forced."""
        return self.forced[self.num_forced] if self.num_forced < len(self.forced) else None

    def _advance(self, token_id: int) -> None:
        expected = self.next_forced
        if expected is not None:
            if token_id != expected:
                raise OverruledError(f"token {token_id} was drawn where {expected} was forced")
            self.num_forced += 1
            if self.next_forced is None:
                self.is_on, self.forced, self.num_forced = False, (), 0
                self.tail, self.tail_text = (), b""
            return
        was_on = self.is_on
        self._look(token_id)
        if self.is_on and was_on:
            self.num_thought += 1
        self._start_forcing()

    def _look(self, token_id: int) -> None:
        """Add a token to the tail and switch thinking on or off if it completes a marker."""
        start, end = self.markers.start, self.markers.end
        tail = (*self.tail, token_id)
        text = self.tail_text + self.markers.token_bytes(token_id)
        rest = self._behind_marker(tail, text)
        while rest is not None:  # one token may complete several markers
            self.is_on, self.num_thought, tail, text = not self.is_on, 0, (), rest
            rest = self._behind_marker(tail, text)
        self.tail = tail[-max(len(start.ids), len(end.ids)) :]
        self.tail_text = text[-max(len(start.text), len(end.text), 1) :]

    def _behind_marker(self, tail: Ids, text: bytes) -> bytes | None:
        """Return the text after the marker that is expected next; None if the marker is not complete."""
        awaited = self.markers.end if self.is_on else self.markers.start
        if not awaited.text:
            return b"" if tail[-len(awaited.ids) :] == awaited.ids else None
        _, marker, rest = text.partition(awaited.text)
        return rest if marker else None

    def _start_forcing(self) -> None:
        room = max(self.budget - len(self.markers.sentence), 0)
        if self.is_on and self.num_thought >= room:
            self.forced = self.markers.sentence + self.markers.end.ids
            # If the model has begun to write the end marker, force only the rest.
            self.num_forced = 0 if self.markers.sentence else self._num_begun()

    def _num_begun(self) -> int:
        """Return how many tokens of the end marker the model has already written."""
        end = self.markers.end
        sizes = range(len(end.ids) - 1, 0, -1)
        if not end.text:
            return next((size for size in sizes if self.tail[-size:] == end.ids[:size]), 0)
        begun = {size: b"".join(map(self.markers.token_bytes, end.ids[:size])) for size in sizes}
        return next((size for size, text in begun.items() if text and self.tail_text.endswith(text)), 0)


@final
class ThinkingBudgetLogitsProcessor(LogitsProcessor):
    """Ends thinking after `thinking_budget` tokens by forcing `think_stop_sentence`, then the end marker.

    Thinking starts after the marker `think_start`, in the prompt or the completion. Prompt tokens do not
    count toward the budget, but the stop sentence does. Each further start marker starts a new budget. A
    forced token has the logit 0.0, and all other tokens have -inf. A marker given as text matches in any
    tokenization; a marker given as `..._token_ids` matches exactly these tokens.
    """

    Args = ThinkingBudgetArgs

    def __init__(self, config: EngineConfig) -> None:
        del config
        self._encode: Callable[[str], Ids] = _no_tokenizer
        self._token_bytes: Callable[[int], bytes] = bytes
        self._states: dict[RowKey, Thinking] = {}
        self._forced: list[tuple[int, int]] = []

    def bind(self, model: ModelFacts) -> None:
        """Receive the tokenizer."""
        self._encode = lru_cache(maxsize=1024)(lambda text: tuple(model.encode(text)))
        self._token_bytes = model.vocabulary.token_bytes

    def check_args(self, args: Any) -> None:
        """Raise `ParameterError` for a marker without tokens, and for equal markers."""
        markers = self._markers(args)
        require(markers.start.ids, "think_start", "has no tokens in this model's vocabulary")
        require(markers.end.ids, "think_end", "has no tokens in this model's vocabulary")
        require(markers.start != markers.end, "think_end", "must differ from think_start")

    def update_state(self, batch: BatchState) -> None:
        """Observe the new tokens, and find the rows in which the next token is forced."""
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

    def apply(self, logits: Any) -> Any:
        """Mask all tokens except the forced token in each row that has one, in place."""
        for index, token_id in self._forced:
            logits[index] = -math.inf
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
        def marker(token_ids: list[int], text: str) -> Marker:
            return Marker(tuple(token_ids)) if token_ids else Marker(self._encode(text), text.encode())

        sentence = args.think_stop_sentence_token_ids or self._encode(args.think_stop_sentence or "")
        return Markers(
            marker(args.think_start_token_ids, args.think_start),
            marker(args.think_end_token_ids, args.think_end),
            self._token_bytes,
            tuple(sentence),
        )


def _no_tokenizer(text: str) -> Ids:
    raise AssertionError(f"bind comes before {text!r} is looked up")
