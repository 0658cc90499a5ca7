"""`Sample`: one sample of one request while it runs, and where it stands; `SampleRow`: one row to draw from.

Positions [0, num_computed) have a slot; positions [0, num_in_tree) have theirs in the radix tree, the
rest of the slots (generated tokens) are the sample's own. Within a step, positions [num_tokens,
num_computed) hold drafts. The scheduler alone changes a sample.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.text.pieces import StopMatcher
from logprobe.transport.messages import Finish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.plan.drafts import PromptLookup
    from logprobe.engine.plan.radix import Node
    from logprobe.errors import LogprobeError
    from logprobe.processors import ProcessorEffect
    from logprobe.processors.pipeline import ActiveSample
    from logprobe.records.values import IntArray
    from logprobe.transport.messages import Drafts, PausedBy, Request


def new_generator(request: Request, number: int, index: int, seed: int) -> np.random.Generator:
    """What draws one sample of an engine's `number`-th request; `seed` is the engine's own.

    Streams of different (seed, sample) never coincide, nor do those with and without a seed.
    """
    own = request.params.seed
    base = seed if own is None else own
    kind = 2 * (own is None) + (base < 0)
    return np.random.default_rng([index, kind, number if own is None else 0, abs(base)])


class Sample:
    """Tokens, slots and results of one sample; `max_len` bounds prompt and completion together."""

    def __init__(
        self,
        request: Request,
        index: int,
        max_len: int,
        generator: np.random.Generator | None = None,
        lora: Any = None,
        *,
        weights_number: int = 0,
        admitted_s: float | None = None,
    ) -> None:
        self.request = request
        self.lora = lora  # the weights that it runs on, `LoraWeights` or None
        # The same where they change the output head, whose rows are computed apart.
        self.head_lora: Any = lora if lora is not None and lora.changes_head else None
        self.weights_number = weights_number  # the load of the model's own that it runs on, from end to end
        self.admitted_s = admitted_s  # by the monotonic clock; None once it has run
        self.index = index  # which of its request's samples
        self._generator = generator or np.random.default_rng()
        self._uniforms: deque[float] = deque()  # taken from it for the next tokens
        self.caller, self.call = request.caller, request.call  # who calls, and the front door's call
        self.wants_sample = request.params.max_tokens > 0  # tokens are to be generated
        self.num_prompt = len(request.prompt_token_ids)
        # Prompt positions whose logprobs are asked: all but the first, which nothing predicts.
        asks_prompt = request.params.prompt_logprobs is not None and index == 0
        self.num_prompt_rows = self.num_prompt - 1 if asks_prompt else 0
        # The last token generated is never run, so it needs no place in the context.
        self.max_len = min(max_len + 1, self.num_prompt + request.params.max_tokens)
        capacity = max(self.max_len, self.num_prompt)
        self._token_ids: IntArray = np.empty(capacity, dtype=np.int32)
        self._token_ids[: self.num_prompt] = request.prompt_token_ids
        self._slots: IntArray = np.empty(capacity, dtype=np.int32)
        self.num_tokens = self.num_prompt
        self.num_computed = 0
        self.num_in_tree = 0
        self.num_own_slots = 0  # taken for it alone, and not found in the tree
        self.num_cached = 0  # prompt tokens that the tree already had when this sample first came to them
        self._num_reached = 0  # prompt tokens that it has come to, also before a preemption
        # Prompt rows delivered; row r holds the numbers of position r + 1.
        self.num_scored = request.first_scored - 1
        self.node: Node | None = None
        self.is_long = False  # it runs under the model's long rotary frequencies, where those differ
        self.paused_by: set[PausedBy] = set()  # while there is one, it keeps its place and takes no step
        self.active: ActiveSample | None = None  # its logits processors, where it has any
        # The sampler alone draws its tokens: no processor, no forced token, no whole row, nothing to explain,
        # and every position reports the same.
        self.is_plain = not (
            request.forced_token_ids is not None
            or request.wants_row
            or request.params.explain
            or request.params.names_positions
        )
        self.output_token_ids: list[int] = []  # generated; processors hold on to this list
        self.drafts: Drafts | None = None  # what became of them; None: the engine drafts nothing
        self.lookup: PromptLookup | None = None  # what drafts its next tokens; None: nothing does
        self.end: Finish | None = None
        params = request.params
        is_included = params.include_stop_str_in_output
        self.stop_matcher = StopMatcher(params.stop, is_included=is_included) if params.stop else None

    @property
    def token_ids(self) -> IntArray:
        """Prompt and generated tokens, (num_tokens,) int32."""
        return self._token_ids[: self.num_tokens]

    @property
    def slots(self) -> IntArray:
        """The slots of the computed positions, (num_computed,) int32."""
        return self._slots[: self.num_computed]

    @property
    def can_draft(self) -> bool:
        """Whether drafts of its tokens can be verified."""
        return self.drafts is not None and self.drafts.refusal is None

    def ids_between(self, start: int, end: int) -> IntArray:
        """The tokens of positions [start, end), drafts included."""
        return self._token_ids[start:end]

    @property
    def draft_ids(self) -> list[int]:
        """The drafts that this step verifies."""
        drafts: list[int] = self._token_ids[self.num_tokens : self.num_computed].tolist()
        return drafts

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt

    @property
    def num_ready_rows(self) -> int:
        """Prompt rows that can be scored now: computed, and not delivered."""
        return max(min(self.num_computed, self.num_prompt_rows) - self.num_scored, 0)

    @property
    def num_remaining(self) -> int:
        """Tokens still to run through the model; a scored prompt's last token predicts nothing asked."""
        if self.wants_sample:
            return self.num_tokens - self.num_computed
        return max(self.num_prompt_rows - self.num_computed, 0)

    @property
    def has_tail(self) -> bool:
        """Whether some computed tokens are not in the tree."""
        return self.num_in_tree < self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether all that is left to run is the token generated last."""
        return self.num_remaining == 1 and self.num_computed >= self.num_prompt

    @property
    def has_prompt_work(self) -> bool:
        """Whether tokens that were not generated last are left to run, or prompt rows to score."""
        is_scored = self.num_scored >= self.num_prompt_rows
        return not is_scored or (self.num_remaining > 0 and not self.is_decoding)

    @property
    def tail_slots(self) -> IntArray:
        """Slots of computed tokens that are not in the tree."""
        return self._slots[self.num_in_tree : self.num_computed]

    def take_slots(self, slots: IntArray, *, in_tree: bool, is_own: bool = True) -> None:
        """Add the slots of the next positions; others' where the tree knew them."""
        end = self.num_computed + len(slots)
        self._slots[self.num_computed : end] = slots
        if self._num_reached < self.num_prompt and end > self._num_reached:
            reached = min(end, self.num_prompt)
            self.num_cached += 0 if is_own else reached - max(self.num_computed, self._num_reached)
            self._num_reached = reached
        self.num_computed = end
        self.num_own_slots += len(slots) if is_own else 0
        if in_tree:
            self.num_in_tree = end

    def drop_slots(self) -> None:
        """Forget all slots (they were given back); the tokens and results stay."""
        self.num_computed = self.num_in_tree = self.num_own_slots = 0
        self.node = None

    def take_drafts(self, token_ids: Sequence[int], slots: IntArray) -> None:
        """Put drafts after the tokens, for one step."""
        self._token_ids[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids
        self.take_slots(slots, in_tree=False)

    def give_back_drafts(self, end: int) -> IntArray:
        """The slots of drafts up to position `end` that turned out wrong, or stand after the end."""
        kept = min(self.num_computed, self.num_tokens)
        self.num_own_slots -= end - kept
        self.num_computed = kept
        return self._slots[kept:end]

    def append_token(self, token_id: int) -> None:
        """Add a generated token; where a draft says otherwise, nothing after it is computed."""
        if self.num_tokens < self.num_computed and self._token_ids[self.num_tokens] != token_id:
            self.num_computed = self.num_tokens
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        self.output_token_ids.append(token_id)
        if self._uniforms:
            self._uniforms.popleft()

    def forced_token_id(self, ahead: int = 0) -> int | None:
        """The token that comes `ahead` places after the next whatever is drawn; None: the draw decides."""
        forced = self.request.forced_token_ids
        return None if forced is None else int(forced[self.num_generated + ahead])

    def uniform(self, ahead: int = 0) -> float:
        """The number that draws the token `ahead` places after the next, in [0, 1), however often asked.

        A greedy request draws none.
        """
        if self.request.params.is_greedy:
            return 0.0
        while len(self._uniforms) <= ahead:
            self._uniforms.append(self._generator.random())
        return self._uniforms[ahead]

    def finish(self, finish: Finish) -> None:
        """Note why the sample ended; the first reason counts."""
        if self.end is None:
            self.end = finish

    def fail(self, error: LogprobeError) -> None:
        """End the sample with an error."""
        self.finish(Finish("error", error=error))

    @property
    def is_paused(self) -> bool:
        """Whether it takes no step for now: its reader lags, or its caller said so."""
        return bool(self.paused_by)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.end is not None


@dataclass(eq=False, slots=True)
class SampleRow:
    """A row of logits to draw from: for a sample's next token, or for one after `ahead` drafts."""

    sample: Sample
    ahead: int = 0
    position: int = field(init=False)  # of the token
    error: LogprobeError | None = None  # of its processors
    effects: list[ProcessorEffect] | None = None  # of its processors; None: not asked

    def __post_init__(self) -> None:
        self.position = self.sample.num_tokens + self.ahead

    @property
    def slot(self) -> int:
        """Where the token stands after which this one comes."""
        return int(self.sample.slots[self.position - 1])

    @property
    def is_right(self) -> bool:
        """Whether the text has come to just this place, by way of the drafts before it."""
        sample = self.sample
        if sample.is_finished or sample.num_tokens != self.position:
            return False
        return self.ahead == 0 or sample.num_computed >= self.position
