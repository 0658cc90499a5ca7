"""`Sample`: the state of one unfinished sample of a request; `SampleRow`: a row of logits to sample from.

Positions [0, num_computed) have a slot. The radix tree owns the slots of positions [0, num_in_tree); the
sample owns the other slots, usually those of generated tokens. During a step, positions [num_tokens,
num_computed) hold draft tokens. Only the engine's thread modifies a sample.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.text.pieces import StopMatcher
from logprobe.transport.messages import Finish

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.engine.plan.capture import SampleCapture
    from logprobe.engine.plan.drafts import PromptLookup
    from logprobe.engine.plan.radix import Node
    from logprobe.engine.protocol import ModelShape
    from logprobe.errors import LogprobeError
    from logprobe.processors import ProcessorEffect
    from logprobe.processors.pipeline import ActiveSample
    from logprobe.records.values import IntArray
    from logprobe.transport.messages import Drafts, PausedBy, Request


GENERATOR: Final = "philox4x64-10"  # name of the algorithm in `LogprobsInfo`


def new_generator(request: Request, number: int, index: int, seed: int) -> np.random.Generator:
    """Return the random generator for sample `index` of the engine's `number`-th request.

    `seed` is the engine's seed, which is used if the request has none. Different seeds and samples get
    independent streams of numbers, as do different requests without a seed.

    The generator is counter-based: Philox4x64-10 (Salmon et al. 2011) as in NumPy, which computes four
    numbers from a key and a counter. The key is a hash of seed and sample. Token n of the completion (counted
    from 0) is sampled with number n % 4 of counter n // 4 + 1.
    """
    own = request.params.seed
    base = seed if own is None else own
    kind = 2 * (own is None) + (base < 0)
    words = np.random.SeedSequence([index, kind, number if own is None else 0, abs(base)])
    return np.random.Generator(np.random.Philox(key=words.generate_state(2, np.uint64)))


class Sample:
    """Tokens, KV cache slots and state of one sample; `max_len` limits prompt and completion together."""

    def __init__(
        self,
        request: Request,
        index: int,
        max_len: int,
        make_generator: Callable[[], np.random.Generator] = np.random.default_rng,
        lora: Any = None,
        *,
        weights_number: int = 0,
        admitted_s: float | None = None,
    ) -> None:
        self.request = request
        self.lora = lora  # `LoraWeights` or None
        # Set only if the LoRA changes the output head, whose rows are then computed separately.
        self.head_lora: Any = lora if lora is not None and lora.changes_head else None
        self.weights_number = weights_number  # load number of the model weights
        self.admitted_s = admitted_s  # seconds on the monotonic clock; None once the sample has started
        self.index = index  # of the sample in its request
        self._make_generator = make_generator
        self._generator: np.random.Generator | None = None  # made when the first number is needed
        self._num_random = 0  # numbers that the generator has given; token n is sampled with number n
        self._uniforms: deque[float] = deque()  # the numbers for the next tokens, as far as they are known
        self.caller, self.call = request.caller, request.call  # for fair sharing
        self.wants_sample = request.params.max_tokens > 0  # generates tokens
        self.num_prompt = len(request.prompt_token_ids)
        # Prompt positions to score: all but the first, which has no prediction.
        asks_prompt = request.params.prompt_logprobs is not None and index == 0
        self.num_prompt_rows = self.num_prompt - 1 if asks_prompt else 0
        # The last generated token is never run, so it needs no position in the context.
        self.max_len = min(max_len + 1, self.num_prompt + request.params.max_tokens)
        capacity = max(self.max_len, self.num_prompt)
        self._token_ids: IntArray = np.empty(capacity, dtype=np.int32)
        self._token_ids[: self.num_prompt] = request.prompt_token_ids
        self._slots: IntArray = np.empty(capacity, dtype=np.int32)
        self.num_tokens = self.num_prompt
        self.num_computed = 0
        self.num_in_tree = 0
        self.num_own_slots = 0  # slots allocated for this sample, as opposed to found in the tree
        self.num_cached = 0  # prompt tokens found in the tree when the sample first reached them
        self._num_reached = 0  # prompt tokens reached so far, including before a preemption
        # Number of prompt rows delivered; row r holds the log-probabilities of position r + 1.
        self.num_scored = request.first_scored - 1
        self.capture: SampleCapture | None = None  # activations to report; None: none
        self.is_fresh = False  # takes no keys and values from the cache, because all tokens are captured
        self.is_private = False  # its keys and values must not be cached, because its routes were given
        self.num_to_run = self.num_prompt_rows  # prompt tokens to run if none is generated
        self.node: Node | None = None
        self.is_long = False  # uses the model's long rotary frequencies
        self.paused_by: set[PausedBy] = set()  # while not empty, the sample keeps its place but is not run
        self.active: ActiveSample | None = None  # the sample's logits processors, if any
        # True if the sampler alone produces the tokens: the request has no processors, forced tokens, whole
        # row, explanations, per-position ids or digests.
        self.is_plain = not (
            request.forced_token_ids is not None
            or request.wants_row
            or request.params.explain
            or request.params.names_positions
            or request.params.digest
        )
        self.output_token_ids: list[int] = []  # generated tokens; processors keep a reference to this list
        self.drafts: Drafts | None = None  # draft counters; None: no speculative decoding
        self.lookup: PromptLookup | None = None  # source of drafts; None: not yet used
        self.end: Finish | None = None
        params = request.params
        is_included = params.include_stop_str_in_output
        self.stop_matcher = StopMatcher(params.stop, is_included=is_included) if params.stop else None

    def capture_as(self, capture: SampleCapture, shape: ModelShape) -> None:
        """Report activations; must be called before the sample is scheduled."""
        self.capture = capture
        self.is_fresh = capture.is_fresh(shape)
        self.is_private = capture.given is not None
        self.num_to_run = max(self.num_to_run, capture.num_prompt)

    @property
    def token_ids(self) -> IntArray:
        """Prompt and generated tokens, (num_tokens,) int32."""
        return self._token_ids[: self.num_tokens]

    @property
    def slots(self) -> IntArray:
        """Slots of the computed positions, (num_computed,) int32."""
        return self._slots[: self.num_computed]

    def kept_slots(self, start: int, end: int) -> IntArray:
        """Return the slots of positions [start, end), which must be in the KV cache."""
        return self._slots[start:end]

    @property
    def can_draft(self) -> bool:
        """True if speculative decoding applies to the sample."""
        return self.drafts is not None and self.drafts.refusal is None

    def ids_between(self, start: int, end: int) -> IntArray:
        """Return the tokens at positions [start, end), including drafts."""
        return self._token_ids[start:end]

    @property
    def draft_ids(self) -> list[int]:
        """Draft tokens that the current step verifies."""
        drafts: list[int] = self._token_ids[self.num_tokens : self.num_computed].tolist()
        return drafts

    @property
    def num_generated(self) -> int:
        """Number of tokens generated so far."""
        return self.num_tokens - self.num_prompt

    @property
    def num_ready_rows(self) -> int:
        """Number of prompt rows that are computed but not yet scored."""
        return max(min(self.num_computed, self.num_prompt_rows) - self.num_scored, 0)

    @property
    def num_remaining(self) -> int:
        """Number of tokens still to run; if the prompt is only scored, its last token need not be run."""
        if self.wants_sample:
            return self.num_tokens - self.num_computed
        return max(self.num_to_run - self.num_computed, 0)

    @property
    def has_tail(self) -> bool:
        """True if some computed tokens are not in the tree."""
        return self.num_in_tree < self.num_computed

    @property
    def is_decoding(self) -> bool:
        """True if only the last generated token is left to run."""
        return self.num_remaining == 1 and self.num_computed >= self.num_prompt

    @property
    def has_prompt_work(self) -> bool:
        """True if there are prompt tokens or recomputed tokens left to run, or prompt rows left to score."""
        is_scored = self.num_scored >= self.num_prompt_rows
        return not is_scored or (self.num_remaining > 0 and not self.is_decoding)

    @property
    def tail_slots(self) -> IntArray:
        """Slots of the computed tokens that are not in the tree."""
        return self._slots[self.num_in_tree : self.num_computed]

    def take_slots(self, slots: IntArray, *, in_tree: bool, is_own: bool = True) -> None:
        """Assign slots to the next positions.

        Args:
            slots: one slot per position.
            in_tree: the tree owns the slots.
            is_own: the slots were allocated for this sample; False if they were found in the tree.
        """
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
        """Forget all slots after they were released; tokens and results are kept."""
        self.num_computed = self.num_in_tree = self.num_own_slots = 0
        self.node = None

    def take_drafts(self, token_ids: Sequence[int], slots: IntArray) -> None:
        """Place draft tokens after the sample's tokens for one step; `slots` has one slot per draft."""
        self._token_ids[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids
        self.take_slots(slots, in_tree=False)

    def give_back_drafts(self, end: int) -> IntArray:
        """Give up the slots of drafts that were rejected or come after the sample's last token.

        `end` is the position after the last draft. Returns the slots, for the caller to free.
        """
        kept = min(self.num_computed, self.num_tokens)
        self.num_own_slots -= end - kept
        self.num_computed = kept
        return self._slots[kept:end]

    def append_token(self, token_id: int) -> None:
        """Append a generated token; if the draft at its position differs, discard it and later drafts."""
        if self.num_tokens < self.num_computed and self._token_ids[self.num_tokens] != token_id:
            self.num_computed = self.num_tokens
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        self.output_token_ids.append(token_id)
        if self._uniforms:
            self._uniforms.popleft()

    def forced_token_id(self, ahead: int = 0) -> int | None:
        """Return the id of the forced token at output index `num_generated + ahead`, or None."""
        forced = self.request.forced_token_ids
        return None if forced is None else int(forced[self.num_generated + ahead])

    def uniform(self, ahead: int = 0) -> float:
        """Return the random number in [0, 1) for sampling the token at output index `num_generated + ahead`.

        Repeated calls return the same number. A greedy request gets 0.
        """
        if self.request.params.is_greedy:
            return 0.0
        if self._generator is None:
            self._generator = self._make_generator()
        while self._num_random <= self.num_generated + ahead:
            number = self._generator.random()
            if self._num_random >= self.num_generated:  # else the token was not sampled
                self._uniforms.append(number)
            self._num_random += 1
        return self._uniforms[ahead]

    def finish(self, finish: Finish) -> None:
        """End the sample; has no effect if it has already ended."""
        if self.end is None:
            self.end = finish

    def fail(self, error: LogprobeError) -> None:
        """End the sample with an error."""
        self.finish(Finish("error", error=error))

    @property
    def is_paused(self) -> bool:
        """True while the sample is paused, by the caller or because its reader is slow."""
        return bool(self.paused_by)

    @property
    def is_finished(self) -> bool:
        """True once the sample has ended for any reason."""
        return self.end is not None


@dataclass(eq=False, slots=True)
class SampleRow:
    """A row of logits to sample from: for a sample's next token, or for the token after `ahead` drafts."""

    sample: Sample
    ahead: int = 0
    position: int = field(init=False)  # of the token to draw
    error: LogprobeError | None = None  # raised by a processor
    effects: list[ProcessorEffect] | None = None  # what each processor changed; None: not requested

    def __post_init__(self) -> None:
        self.position = self.sample.num_tokens + self.ahead

    @property
    def slot(self) -> int:
        """Slot of the preceding token, whose hidden state the logits are computed from."""
        return int(self.sample.slots[self.position - 1])

    @property
    def is_used(self) -> bool:
        """True if all drafts before this row were accepted, so that the row's sampled token is used."""
        sample = self.sample
        if sample.is_finished or sample.num_tokens != self.position:
            return False
        return self.ahead == 0 or sample.num_computed >= self.position
