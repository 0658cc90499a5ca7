"""The scheduler: plans each step's tokens and slots, the prompt rows to score, and the tokens to sample.

A step mixes one token of each generating sample with chunks of prompts, oldest samples first, up to
`max_num_batched_tokens`; `FairShares` limits each call while other calls wait. Prompt tokens found in the
radix tree are not run again. Prompt tokens enter the tree when they are *planned*, so prompts in the same
step also share their prefix (attention stores all keys of a step before it reads any). If slots run out,
unused prefixes are evicted first; then a paused sample is preempted; then the sample picked by `FairShares`.
Preempted samples are recomputed later. Drafts are verified with what is left of a step's budget.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from logprobe import runtime
from logprobe.engine.durations import Durations
from logprobe.engine.plan.drafts import PromptLookup, least_chance
from logprobe.engine.plan.radix import EMPTY, RadixTree, SlotPool
from logprobe.engine.plan.sample import SampleRow
from logprobe.engine.plan.shares import FairShares, StepShare
from logprobe.engine.protocol import StepBatch
from logprobe.transport.messages import Drafts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logprobe.engine.draft_model import DraftModel
    from logprobe.engine.plan.radix import Node
    from logprobe.engine.plan.sample import Sample
    from logprobe.records.values import IntArray

logger = logging.getLogger("logprobe")


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, end) of a sample."""

    sample: Sample
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class StepPlan:
    """One step: the tokens to run, the prompt rows to score, and the rows to sample from."""

    tokens: list[Span] = field(default_factory=list)  # including drafts; at most one span per sample
    drafts: list[Span] = field(default_factory=list)  # the parts of `tokens` that are drafts
    prompt_rows: list[Span] = field(default_factory=list)  # position p of a span predicts token p + 1
    sample_rows: list[SampleRow] = field(default_factory=list)  # grouped by sample, in order
    touched: set[Sample] = field(default_factory=set)  # samples that a failed step must end
    captured: Sequence[Sample] = ()  # samples that report activations

    def batch(self) -> StepBatch:
        """Return the step as arrays for the forward pass."""
        spans = self.tokens
        lengths = [len(span) for span in spans]
        return StepBatch(
            token_ids=_joined([span.sample.ids_between(span.start, span.end) for span in spans]),
            positions=_joined([np.arange(span.start, span.end, dtype=np.int32) for span in spans]),
            slots=_joined([span.sample.slots[span.start : span.end] for span in spans]),
            starts=np.cumsum([0, *lengths], dtype=np.int32),
            context_slots=[span.sample.slots[: span.end] for span in spans],
            loras=[span.sample.lora for span in spans],
            draw_slots=np.array([row.slot for row in self.sample_rows], dtype=np.int32),
            are_long=[span.sample.is_long for span in spans],
        )


def _is_first(sample: Sample) -> bool:
    return sample.wants_sample and not sample.num_generated


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else EMPTY


class Scheduler:
    """Owns the waiting and running samples and allocates all slots."""

    def __init__(
        self,
        num_slots: int,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        rope_boundary: int | None = None,
        gathers_calls: bool = False,
        waits: Durations | None = None,
        on_free: Callable[[IntArray], None] | None = None,
        drafter: DraftModel | None = None,
    ) -> None:
        """Create a scheduler with an empty KV cache.

        Args:
            num_slots: size of the KV cache in tokens.
            max_num_batched_tokens: maximum number of tokens in a step.
            max_num_seqs: maximum number of running samples.
            rope_boundary: length in tokens above which a text uses the long rotary frequencies.
            gathers_calls: sample the first tokens of all prompts of a call in the same step, if they fit.
            waits: records how long each sample waited for its first step.
            on_free: called with freed slots before they are allocated again.
            drafter: drafts tokens where the text has no repetition; None: only repetitions are drafted.
        """
        self.pool = SlotPool(num_slots, on_free)
        self.tree = RadixTree(self.pool)
        self.max_num_batched_tokens = max_num_batched_tokens
        # Every running sample can run one token per step, so none starves.
        self.max_running = min(max_num_seqs, max_num_batched_tokens)
        self.shares = FairShares(self.max_running, num_slots)
        self._gathers_calls, self._has_split = gathers_calls, False
        self._rope_boundary = rope_boundary  # longer texts use the long rotary frequencies
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []  # oldest first
        self.num_preempted = 0
        self.num_cached_tokens = 0
        self.drafts = Drafts()  # counts of all samples
        self.drafter = drafter
        self.has_captures = False  # False: no sample reports activations
        self._waits = Durations() if waits is None else waits

    @property
    def has_work(self) -> bool:
        """True if there is a running or waiting sample that is not paused."""
        return any(not sample.is_paused for sample in self.samples())

    @property
    def num_available(self) -> int:
        """Number of slots that are free or evictable."""
        return self.pool.num_free + self.tree.num_evictable

    def add(self, sample: Sample) -> None:
        """Add a sample to the end of the waiting queue."""
        self.shares.add(sample)
        self.waiting.append(sample)
        self.has_captures |= sample.capture is not None

    def schedule(self) -> StepPlan:
        """Plan one step and allocate its slots."""
        self.tree.begin_step()
        plan = StepPlan()
        if self._rope_boundary is not None:
            self._restart_outgrown()
        if self.waiting:
            self._admit()
        # Resumed samples may exceed the limit of a step; the oldest come first.
        active = [sample for sample in self.running if not sample.is_paused][: self.max_running]
        share = StepShare(active, self.max_num_batched_tokens, is_shared=self.shares.is_shared)
        active = share.in_turn(active)
        prompts = [sample for sample in active if not sample.is_decoding]
        num_decoding = len(active) - len(prompts)
        budget = share.split(
            self.max_num_batched_tokens - num_decoding, prompts, lambda sample: sample.num_remaining
        )
        for sample in active:
            if sample.node is None:  # preempted by an older one
                continue
            if not prompts or sample.is_decoding:
                self._plan_tokens(sample, plan, 1)
            else:
                is_large = share.is_large(sample)
                budget[is_large] -= self._plan_tokens(sample, plan, budget[is_large])
        scored = [sample for sample in active if sample.num_scored < sample.num_prompt_rows]
        if scored:
            self._plan_prompt_rows(scored, plan, share)
        drawn = [sample for sample in active if self._is_drawn(sample)]
        if self._gathers_calls:
            late = [one for one in active if _is_first(one) and one.node and not self._is_drawn(one)]
            # Samples that made no use of the remaining budget get no slots until others end.
            going = {
                one.call
                for one in late
                if one in plan.touched or not one.num_remaining or budget[share.is_large(one)] <= 0
            }
            drawn = self._gathered(drawn, late, going)
        plan.touched.update(drawn)
        if any(sample.drafts is not None for sample in drawn):
            self._plan_drafts(plan, drawn)
        if plan.drafts:
            plan.sample_rows = [
                SampleRow(sample, ahead) for sample in drawn for ahead in range(len(sample.draft_ids) + 1)
            ]
        else:
            plan.sample_rows = [SampleRow(sample) for sample in drawn]
        if self.has_captures:
            plan.captured = [sample for sample in active if sample.capture is not None and sample.node]
            plan.touched.update(plan.captured)
            self.has_captures = any(sample.capture is not None for sample in self.samples())
        return plan

    def settle(self, plan: StepPlan) -> None:
        """Free the slots of drafts that were rejected or come after the end of a sample."""
        for span in plan.drafts:
            wrong = span.sample.give_back_drafts(span.end)
            self.pool.free(wrong)
            drafts = span.sample.drafts
            assert drafts is not None, "a sample with drafts has draft counters"
            num_accepted = len(span) - len(wrong)
            for counts in (drafts, self.drafts):
                counts.count(len(span), num_accepted)
            if self.drafter is not None:
                self.drafter.observe(span.sample, len(span), num_accepted)

    def release(self, sample: Sample, *, keep: bool = True) -> None:
        """Remove a running sample and release its slots; with `keep`, its tokens stay in the prefix cache."""
        self.shares.end(sample)
        self._stop(sample, keep=keep)

    def _stop(self, sample: Sample, *, keep: bool = True) -> None:
        self.running.remove(sample)
        self._let_go(sample, keep=keep)

    def remove(self, sample: Sample) -> None:
        """Remove a running or waiting sample."""
        if sample in self.running:
            self.release(sample)
        else:
            self.shares.end(sample)
            self.waiting.remove(sample)

    def roll_back(self, plan: StepPlan) -> list[Sample]:
        """Undo a failed step: remove its samples and the tree nodes that it added; return the samples."""
        self.settle(plan)
        failed = [sample for sample in self.running if sample in plan.touched]
        for sample in failed:
            self.release(sample, keep=False)
        self.tree.forget_step()
        return failed

    def check_integrity(self) -> None:
        """Assert that every slot has exactly one owner and that lock counts are right."""
        nodes = list(self.tree.nodes())
        tails = [sample.tail_slots for sample in self.running]
        owned = np.concatenate([self.pool.free_slots(), *(node.slots for node in nodes), *tails])
        assert len(owned) == self.pool.num_slots, f"{len(owned)} slots owned of {self.pool.num_slots}"
        assert len(np.unique(owned)) == len(owned), "a slot has two owners"
        assert sum(len(n.slots) for n in nodes if not n.num_locks) == self.tree.num_evictable
        locks: dict[int, int] = {}
        for sample in self.running:
            assert sample.node is not None
            path = list(self.tree.path_up(sample.node))
            assert sum(len(node.slots) for node in path) == sample.num_in_tree, "path and slots disagree"
            along = np.concatenate([node.slots for node in reversed(path)] or [EMPTY])
            assert np.array_equal(along, sample.slots[: sample.num_in_tree]), "slots differ from the path"
            for node in path:
                locks[id(node)] = locks.get(id(node), 0) + 1
        assert all(node.num_locks == locks.get(id(node), 0) for node in nodes), "a lock is unaccounted for"

    def _is_long(self, sample: Sample) -> bool:
        return self._rope_boundary is not None and sample.num_tokens > self._rope_boundary

    def _restart_outgrown(self) -> None:
        """Requeue samples that have crossed the rotary boundary, because all their keys change."""
        for sample in reversed(self.running[:]):
            if sample.is_long != self._is_long(sample):
                self._stop(sample)
                self.waiting.appendleft(sample)

    def _admit(self) -> None:
        num_active = sum(not sample.is_paused for sample in self.running)
        while sample := self.shares.next_in_line(self.waiting, self.running):
            if num_active >= self.max_running:
                giver = self.shares.gives_place(self.running, sample)
                if giver is None:
                    return
                self._preempt(giver)
                num_active -= 1
            if not self._start(sample):
                return
            num_active += 1

    def _start(self, sample: Sample) -> bool:
        """Start a sample from its cached prefix; return False if there are too few slots for the rest."""
        sample.is_long = self._is_long(sample)
        root = self.tree.root((None if sample.lora is None else sample.lora.number, sample.is_long))
        todo = sample.token_ids[: sample.num_remaining]
        node, known = (root, EMPTY) if sample.is_fresh else self.tree.descend(root, todo)
        self.tree.lock(node)
        # Start a sample only if all its present tokens fit; no later sample overtakes it.
        need = len(todo) - len(known) + 1
        while self.num_available < need and (giver := self._giver_of_slots(sample, need)):
            self._preempt(giver)
        if self.running and self.num_available < need:
            self.tree.unlock(node)
            return False
        sample.node = node
        sample.take_slots(known, in_tree=True, is_own=False)
        self.num_cached_tokens += len(known)
        self.waiting.remove(sample)
        self.running.append(sample)
        if sample.admitted_s is not None:
            self._waits.add(runtime.monotonic() - sample.admitted_s)
            sample.admitted_s = None  # a preempted sample is not counted again
        return True

    def _giver_of_slots(self, sample: Sample, need: int) -> Sample | None:
        return self._youngest_paused() or self.shares.gives_slots(self.running, sample, need)

    def _plan_tokens(self, sample: Sample, plan: StepPlan, budget: int) -> int:
        if not (sample.has_tail or sample.is_fresh):
            self._walk_on(sample, plan)
        count, num_preempted = min(sample.num_remaining, budget), self.num_preempted
        count = min(count, self._make_room(count, sample, plan))
        if self.num_preempted > num_preempted and not (sample.has_tail or sample.is_fresh):
            self._walk_on(sample, plan)  # the preempted samples may have left these tokens in the tree
            count = min(count, sample.num_remaining)
        if count == 0:
            return 0
        in_tree = not (sample.is_decoding or sample.is_fresh)
        start = sample.num_computed
        slots = self.pool.allocate(count)
        plan.tokens.append(Span(sample, start, start + count))
        plan.touched.add(sample)
        sample.take_slots(slots, in_tree=in_tree)
        if in_tree:
            assert sample.node is not None
            run = sample.token_ids[start : start + count].copy()
            self._stand_on(sample, self.tree.insert(sample.node, run, slots))
        return count

    def _walk_on(self, sample: Sample, plan: StepPlan) -> None:
        """Reuse slots of the sample's next tokens that other samples have added to the tree meanwhile.

        The other samples include those planned earlier in this step.
        """
        assert sample.node is not None
        start = sample.num_computed
        node, known = self.tree.descend(sample.node, sample.token_ids[start : start + sample.num_remaining])
        if len(known):
            sample.take_slots(known, in_tree=True, is_own=False)
            self.num_cached_tokens += len(known)
            self._stand_on(sample, node)
            plan.touched.add(sample)

    def _stand_on(self, sample: Sample, node: Node) -> None:
        assert sample.node is not None
        self.tree.lock_further(node, sample.node)
        sample.node = node

    def _make_room(self, count: int, sample: Sample, plan: StepPlan) -> int:
        """Free slots for a sample until `count` are free, if possible; return the number of free slots."""
        while self.num_available < count:
            giver = self._youngest_idle() or self.shares.gives_room(self.running, plan.touched)
            if giver is sample or giver in plan.touched:
                break
            self._preempt(giver)
        self._evict_for(count)
        return self.pool.num_free

    def _evict_for(self, count: int) -> None:
        if self.pool.num_free < count:
            # Evict a little more than needed, so that a full pool is not searched at every step.
            self.tree.evict(max(count - self.pool.num_free, self.pool.num_slots // 64))

    def _preempt(self, sample: Sample) -> None:
        self._stop(sample)
        self.waiting.appendleft(sample)
        self.num_preempted += 1

    def _let_go(self, sample: Sample, *, keep: bool) -> None:
        assert sample.node is not None
        if self.drafter is not None:
            self.drafter.forget(sample)
        tail = sample.tail_slots.copy()
        if keep and len(tail) and not sample.is_private:
            start = sample.num_in_tree
            token_ids = sample.token_ids[start : sample.num_computed].copy()
            node, known = self.tree.descend(sample.node, token_ids)
            self.pool.free(tail[: len(known)])
            self.tree.insert(node, token_ids[len(known) :], tail[len(known) :])
        else:
            self.pool.free(tail)
        self.tree.unlock(sample.node)
        sample.drop_slots()

    def _youngest_idle(self) -> Sample | None:
        """Return the youngest sample that is not run: a paused one, or one beyond the limit of a step."""
        active = [sample for sample in self.running if not sample.is_paused]
        return self._youngest_paused() or (active[-1] if len(active) > self.max_running else None)

    def _youngest_paused(self) -> Sample | None:
        return next((sample for sample in reversed(self.running) if sample.is_paused), None)

    def _plan_prompt_rows(self, scored: Sequence[Sample], plan: StepPlan, share: StepShare) -> None:
        """Plan the computed but unscored prompt rows of the samples in `scored`, within the budget."""
        budget = share.split(self.max_num_batched_tokens, scored, lambda sample: sample.num_ready_rows)
        for sample in scored:
            if sample.node is None:  # preempted
                continue
            is_large = share.is_large(sample)
            end = sample.num_scored + min(sample.num_ready_rows, budget[is_large])
            if end > sample.num_scored:
                plan.prompt_rows.append(Span(sample, sample.num_scored, end))
                budget[is_large] -= end - sample.num_scored
                sample.num_scored = end
                plan.touched.add(sample)

    @staticmethod
    def _is_drawn(sample: Sample) -> bool:
        """Return True if the sample's next token can be sampled in this step; False if it was preempted."""
        is_scored = sample.num_scored >= sample.num_prompt_rows
        return sample.node is not None and sample.wants_sample and is_scored and not sample.num_remaining

    def _gathered(self, drawn: list[Sample], late: list[Sample], going: set[str]) -> list[Sample]:
        """Return the samples in `drawn`, except those whose first token must wait for their call in `going`.

        Args:
            drawn: samples whose next token can be sampled.
            late: samples that cannot yet sample their first token.
            going: calls with a sample in `late` that makes progress.
        """
        gathered = [one for one in drawn if not (one.call and one.call in going and _is_first(one))]
        if not self._has_split:
            left = {one.call for one in chain(late, self.waiting) if one.call and _is_first(one)}
            self._has_split = any(one.call in left and _is_first(one) for one in gathered)
            if self._has_split:
                logger.warning(
                    "the prompts of one call do not fit into one step: a logits processor that only keeps "
                    "the rows of the latest step loses some; raise max_num_seqs or "
                    "kv_cache_memory_bytes, or send fewer prompts per call"
                )
        return gathered

    def _plan_drafts(self, plan: StepPlan, drawn: Sequence[Sample]) -> None:
        """Append drafts to the spans of generated tokens, as far as the step and the slots allow."""
        drafting = {sample for sample in drawn if sample.can_draft}
        if not drafting:
            return
        room = min(
            self.max_num_batched_tokens - sum(map(len, plan.tokens)),
            self.max_running - len(drawn),
            self.num_available,
        )
        # A prompt's end may use another attention path than single tokens and differ in the last bits.
        spans = [
            (index, span)
            for index, span in enumerate(plan.tokens)
            if span.sample in drafting and len(span) == 1
        ]
        made = self._drafts_of([span.sample for _, span in spans], room, len(drawn))
        for index, span in spans:
            drafts = made.get(span.sample, ())[: max(room, 0)]
            if drafts:
                self._evict_for(len(drafts))
                span.sample.take_drafts(drafts, self.pool.allocate(len(drafts)))
                end = span.end + len(drafts)
                plan.tokens[index] = Span(span.sample, span.start, end)
                plan.drafts.append(Span(span.sample, span.end, end))
                room -= len(drafts)

    def _drafts_of(self, samples: list[Sample], room: int, num_rows: int) -> dict[Sample, list[int]]:
        """Return at most `room` draft tokens for the samples, from repetitions or from the draft model."""
        made: dict[Sample, list[int]] = {}
        least, others = least_chance(num_rows), {}
        for sample in samples:
            most = self._most_drafts(sample, room)
            drafts = self._draft(sample, most, least)
            if drafts:
                made[sample] = drafts
                room -= len(drafts)
            elif most > 0:
                others[sample] = most
        if self.drafter is not None and others and room > 0:
            others = dict(islice(others.items(), room))
            each = room // len(others)
            made |= self.drafter.draft({sample: min(most, each) for sample, most in others.items()}, num_rows)
        return made

    def _most_drafts(self, sample: Sample, room: int) -> int:
        # The last token is never run; drafts must not carry a short text across the rotary boundary.
        most = min(room, sample.max_len - sample.num_tokens - 1)
        if self._rope_boundary is not None and not sample.is_long:
            most = min(most, self._rope_boundary - sample.num_tokens)
        return most

    @staticmethod
    def _draft(sample: Sample, most: int, least: float) -> list[int]:
        if sample.lookup is None:
            sample.lookup = PromptLookup(sample.token_ids.tolist())
        else:
            num_known = len(sample.lookup) - sample.num_prompt
            sample.lookup.observe(sample.output_token_ids[num_known:])
        return sample.lookup.draft(most, least)

    def samples(self) -> Iterator[Sample]:
        """Iterate over all unfinished samples."""
        return chain(self.running, self.waiting)
