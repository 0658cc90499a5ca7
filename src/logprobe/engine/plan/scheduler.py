"""The scheduler: which tokens run in the next step, in whose slots, and whose logits are wanted.

Every step mixes one token of each generating sequence with chunks of prompts, oldest sequences first,
up to `max_batch_tokens`. What a prompt shares with the radix tree is not run again; runs of prompt
tokens enter the tree when they are *planned*, so that two prompts of one step share their prefix too
(attention writes all keys of a step before it reads any). A full pool first loses what nobody uses,
then preempts the youngest sequence, which starts again later from its tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from logprobe.engine.plan.radix import EMPTY, RadixTree, SlotPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.engine.plan.radix import IntArray, Node
    from logprobe.engine.plan.sample import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, end) of a sequence."""

    sequence: Sequence
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class StepPlan:
    """One step: tokens to run, prompt positions to report, sequences to draw a token for."""

    tokens: list[Span] = field(default_factory=list)
    prompt_rows: list[Span] = field(default_factory=list)
    samples: list[Sequence] = field(default_factory=list)
    touched: set[Sequence] = field(default_factory=set)  # whose state rests on this step's success

    @property
    def slots(self) -> IntArray:
        """The slots that this step fills, in the order of its tokens."""
        return np.concatenate([span.sequence.slots[span.start : span.end] for span in self.tokens] or [EMPTY])


class Scheduler:
    """Owns the waiting and the running sequences, and every slot."""

    def __init__(self, num_slots: int, *, max_batch_tokens: int, max_batch_rows: int) -> None:
        self.pool = SlotPool(num_slots)
        self.tree = RadixTree(self.pool)
        self.max_batch_tokens = max_batch_tokens
        # Each running sequence can take one token a step, so that none waits for ever.
        self.max_running = min(max_batch_rows, max_batch_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preempted = 0
        self.num_cached_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence can go on: one that is paused waits for its reader."""
        return any(not sequence.is_paused for sequence in self.sequences())

    @property
    def num_available(self) -> int:
        """Slots that are free or can be made so."""
        return self.pool.num_free + self.tree.num_evictable

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> StepPlan:
        """Plan one step and hand out its slots."""
        self.tree.begin_step()
        plan = StepPlan()
        self._admit()
        # Those that were paused and go on again may be more than a step takes; the oldest come first.
        active = [sequence for sequence in self.running if not sequence.is_paused][: self.max_running]
        prompt_budget = self.max_batch_tokens - sum(sequence.is_decoding for sequence in active)
        for sequence in active:
            if sequence.node is None:  # an older one preempted it
                continue
            is_decoding = sequence.is_decoding
            used = self._plan_tokens(sequence, plan, 1 if is_decoding else prompt_budget)
            prompt_budget -= 0 if is_decoding else used
        self._plan_rows(active, plan)
        return plan

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence: its computed tokens stay known to the tree (if `keep`), its slots are let go."""
        self.running.remove(sequence)
        self._let_go(sequence, keep=keep)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence wherever it stands."""
        if sequence in self.running:
            self.release(sequence)
        else:
            self.waiting.remove(sequence)

    def roll_back(self, plan: StepPlan) -> list[Sequence]:
        """Undo a step that failed: end every sequence that rests on it and forget what it planned."""
        failed = [sequence for sequence in self.running if sequence in plan.touched]
        for sequence in failed:
            self.release(sequence, keep=False)
        self.tree.forget_step()
        return failed

    def check_integrity(self) -> None:
        """Assert that every slot has exactly one owner and that every lock is accounted for."""
        nodes = list(self.tree.nodes())
        tails = [sequence.tail_slots for sequence in self.running]
        owned = np.concatenate([self.pool.free_slots(), *(node.slots for node in nodes), *tails])
        assert len(owned) == self.pool.num_slots, f"{len(owned)} slots owned of {self.pool.num_slots}"
        assert len(np.unique(owned)) == len(owned), "a slot has two owners"
        assert sum(len(n.slots) for n in nodes if not n.num_locks) == self.tree.num_evictable
        locks: dict[int, int] = {}
        for sequence in self.running:
            assert sequence.node is not None
            path = list(self.tree.path_up(sequence.node))
            assert sum(len(node.slots) for node in path) == sequence.num_in_tree, "path and slots disagree"
            along = np.concatenate([node.slots for node in reversed(path)] or [EMPTY])
            assert np.array_equal(along, sequence.slots[: sequence.num_in_tree]), "slots differ from the path"
            for node in path:
                locks[id(node)] = locks.get(id(node), 0) + 1
        assert all(node.num_locks == locks.get(id(node), 0) for node in nodes), "a lock is unaccounted for"

    def _admit(self) -> None:
        num_active = sum(not sequence.is_paused for sequence in self.running)
        while num_active < self.max_running:
            sequence = next((one for one in self.waiting if not one.is_paused), None)
            if sequence is None:
                return
            root = self.tree.root(sequence.request.adapter)
            todo = sequence.token_ids[: sequence.num_remaining]
            node, known = self.tree.descend(root, todo)
            self.tree.lock(node)
            # Only a sequence whose whole present need fits is let in; the first in line is never passed by.
            need = len(todo) - len(known) + 1
            while self.num_available < need and (paused := self._youngest_paused()):
                self._preempt(paused)
            if self.running and self.num_available < need:
                self.tree.unlock(node)
                return
            sequence.node = node
            sequence.take_slots(known, in_tree=True)
            self.num_cached_tokens += len(known)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            num_active += 1

    def _plan_tokens(self, sequence: Sequence, plan: StepPlan, budget: int) -> int:
        if not sequence.has_tail:
            self._walk_on(sequence, plan)
        in_tree = not sequence.is_decoding
        count = min(sequence.num_remaining, budget)
        count = min(count, self._make_room(count, sequence, plan))
        if count == 0:
            return 0
        start = sequence.num_computed
        slots = self.pool.allocate(count)
        plan.tokens.append(Span(sequence, start, start + count))
        plan.touched.add(sequence)
        sequence.take_slots(slots, in_tree=in_tree)
        if in_tree:
            assert sequence.node is not None
            run = sequence.token_ids[start : start + count].copy()
            self._stand_on(sequence, self.tree.insert(sequence.node, run, slots))
        return count

    def _walk_on(self, sequence: Sequence, plan: StepPlan) -> None:
        """Take what the tree has learnt since (from sequences planned before this one, too)."""
        assert sequence.node is not None
        start = sequence.num_computed
        node, known = self.tree.descend(
            sequence.node, sequence.token_ids[start : start + sequence.num_remaining]
        )
        if len(known):
            sequence.take_slots(known, in_tree=True)
            self.num_cached_tokens += len(known)
            self._stand_on(sequence, node)
            plan.touched.add(sequence)

    def _stand_on(self, sequence: Sequence, node: Node) -> None:
        self.tree.lock(node)
        assert sequence.node is not None
        self.tree.unlock(sequence.node)
        sequence.node = node

    def _make_room(self, count: int, sequence: Sequence, plan: StepPlan) -> int:
        """Free up to `count` slots for a sequence; the number that it may take."""
        while self.num_available < count:
            youngest = self._youngest_paused() or self.running[-1]
            if youngest is sequence or youngest in plan.touched:
                break
            self._preempt(youngest)
        if self.pool.num_free < count:
            # A little more than asked, so that a full pool is not searched at every step.
            self.tree.evict(max(count - self.pool.num_free, self.pool.num_slots // 64))
        return self.pool.num_free

    def _preempt(self, sequence: Sequence) -> None:
        self.release(sequence)
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def _let_go(self, sequence: Sequence, *, keep: bool) -> None:
        assert sequence.node is not None
        tail = sequence.tail_slots.copy()
        if keep and len(tail):
            start = sequence.num_in_tree
            token_ids = sequence.token_ids[start : sequence.num_computed].copy()
            node, known = self.tree.descend(sequence.node, token_ids)
            self.pool.free(tail[: len(known)])
            self.tree.insert(node, token_ids[len(known) :], tail[len(known) :])
        else:
            self.pool.free(tail)
        self.tree.unlock(sequence.node)
        sequence.drop_slots()

    def _youngest_paused(self) -> Sequence | None:
        return next((sequence for sequence in reversed(self.running) if sequence.is_paused), None)

    def _plan_rows(self, active: Iterable[Sequence], plan: StepPlan) -> None:
        budget = self.max_batch_tokens
        for sequence in active:
            if sequence.node is None:  # preempted
                continue
            ready = min(sequence.num_computed, sequence.num_prompt_rows)
            end = min(ready, sequence.num_scored + budget)
            if end > sequence.num_scored:
                plan.prompt_rows.append(Span(sequence, sequence.num_scored, end))
                budget -= end - sequence.num_scored
                sequence.num_scored = end
                plan.touched.add(sequence)
            is_scored = sequence.num_scored == sequence.num_prompt_rows
            if sequence.wants_sample and sequence.num_remaining == 0 and is_scored:
                plan.samples.append(sequence)
                plan.touched.add(sequence)

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that has not ended."""
        return chain(self.running, self.waiting)
