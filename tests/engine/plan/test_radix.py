"""The radix tree and its slots, compared with a plain dict of prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from logprobe.engine.plan.radix import RadixTree, SlotPool, shared_length

NUM_SLOTS = 24
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
ADAPTERS = st.sampled_from([None, "tuned"])


def ids_of(values: Any) -> Any:
    return np.array(list(values), dtype=np.int32)


class TreeMachine(RuleBasedStateMachine):
    """Compare the tree with a twin dict: (adapter, prefix) to the slot of the prefix's last token."""

    @initialize()
    def start(self) -> None:
        self.pool = SlotPool(NUM_SLOTS)
        self.tree = RadixTree(self.pool)
        self.twin: dict[tuple[Any, tuple[int, ...]], int] = {}
        self.born: dict[tuple[Any, tuple[int, ...]], int] = {}
        self.step = 1
        self.tree.begin_step()
        self.locked: list[tuple[Any, Any, tuple[int, ...]]] = []

    def known(self, adapter: Any, ids: list[int]) -> int:
        """Return how many leading ids the twin knows."""
        length = 0
        while length < len(ids) and (adapter, tuple(ids[: length + 1])) in self.twin:
            length += 1
        return length

    def slots(self, adapter: Any, ids: list[int], start: int, end: int) -> list[int]:
        return [self.twin[adapter, tuple(ids[: at + 1])] for at in range(start, end)]

    @rule(adapter=ADAPTERS, ids=IDS, locks=st.booleans())
    def insert(self, adapter: Any, ids: list[int], locks: bool) -> None:
        length = self.known(adapter, ids)
        node, slots = self.tree.descend(self.tree.root(adapter), ids_of(ids))
        assert slots.tolist() == self.slots(adapter, ids, 0, length)
        count = min(len(ids) - length, self.pool.num_free)
        taken = self.pool.allocate(count)
        node = self.tree.insert(node, ids_of(ids[length : length + count]), taken)
        for place, slot in enumerate(taken.tolist()):
            prefix = (adapter, tuple(ids[: length + place + 1]))
            self.twin[prefix] = slot
            self.born[prefix] = self.step
        if locks and length + count:
            self.tree.lock(node)
            self.locked.append((node, adapter, tuple(ids[: length + count])))

    @rule(adapter=ADAPTERS, ids=IDS)
    def descend(self, adapter: Any, ids: list[int]) -> None:
        length = self.known(adapter, ids)
        _, slots = self.tree.descend(self.tree.root(adapter), ids_of(ids))
        assert slots.tolist() == self.slots(adapter, ids, 0, length)

    @rule(data=st.data(), ids=IDS)
    def descend_from_a_locked_node(self, data: Any, ids: list[int]) -> None:
        if self.locked:
            node, adapter, prefix = data.draw(st.sampled_from(self.locked))
            whole = [*prefix, *ids]
            length = self.known(adapter, whole)
            _, slots = self.tree.descend(node, ids_of(ids))
            assert slots.tolist() == self.slots(adapter, whole, len(prefix), length)

    @rule(data=st.data(), ids=IDS)
    def walk_on_from_a_locked_node(self, data: Any, ids: list[int]) -> None:
        if self.locked:
            place = data.draw(st.integers(0, len(self.locked) - 1))
            above, adapter, prefix = self.locked[place]
            length = self.known(adapter, [*prefix, *ids])
            node, _ = self.tree.descend(above, ids_of(ids))
            self.tree.lock_further(node, above)
            self.locked[place] = (node, adapter, (*prefix, *ids)[:length])

    @rule(data=st.data())
    def unlock(self, data: Any) -> None:
        if self.locked:
            place = data.draw(st.integers(0, len(self.locked) - 1))
            self.tree.unlock(self.locked.pop(place)[0])

    @rule(count=st.integers(0, NUM_SLOTS + 2))
    def evict(self, count: int) -> None:
        before, evictable = self.pool.num_free, self.tree.num_evictable
        self.tree.evict(count)
        assert self.pool.num_free - before >= min(count, evictable)
        self.drop_what_is_gone()

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.drop_what_is_gone()
        assert set(self.twin) == self.pinned()

    @rule()
    def begin_step(self) -> None:
        self.tree.begin_step()
        self.step += 1

    @rule()
    def forget_step(self) -> None:
        # Requests that hold this step's tokens are ended first, as the scheduler does.
        for entry in [entry for entry in self.locked if self.born[entry[1], entry[2]] == self.step]:
            self.tree.unlock(entry[0])
            self.locked.remove(entry)
        self.tree.forget_step()
        new = {prefix for prefix in self.twin if self.born[prefix] == self.step}
        self.drop_what_is_gone()
        assert not new & set(self.twin)

    def pinned(self) -> set[Any]:
        return {
            (adapter, prefix[:length])
            for _, adapter, prefix in self.locked
            for length in range(1, len(prefix) + 1)
        }

    def drop_what_is_gone(self) -> None:
        """Drop the prefixes that the tree evicted from the twin; no pinned prefix may be among them."""
        held = self.held()
        gone = set(self.twin) - set(held)
        assert not gone & self.pinned(), "a pinned prefix went"
        for prefix in gone:
            del self.twin[prefix], self.born[prefix]

    def held(self) -> dict[Any, int]:
        """Return every prefix in the tree, read node by node."""
        prefixes: dict[Any, int] = {}
        stack = [(adapter, (), root) for adapter, root in self.tree._roots.items()]
        while stack:
            adapter, prefix, node = stack.pop()
            for place, slot in enumerate(node.slots.tolist()):
                prefixes[adapter, prefix + tuple(node.token_ids[: place + 1].tolist())] = slot
            below = prefix + tuple(node.token_ids.tolist())
            stack.extend((adapter, below, child) for child in node.children.values())
        return prefixes

    @invariant()
    def tree_and_twin_hold_the_same(self) -> None:
        assert self.held() == self.twin

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        owned = [*self.pool.free_slots().tolist(), *self.twin.values()]
        assert sorted(owned) == list(range(NUM_SLOTS))

    @invariant()
    def what_nobody_pins_is_evictable(self) -> None:
        assert self.tree.num_evictable >= len(self.twin) - len(self.pinned())
        assert self.tree.num_evictable == sum(len(n.slots) for n in self.tree.nodes() if not n.num_locks)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool = SlotPool(9)
    tree = RadixTree(pool)
    for first in (1, 2, 3):
        tree.insert(tree.root(), ids_of([first, 7, 8]), pool.allocate(3))
    node, _ = tree.descend(tree.root(), ids_of([1, 7, 8]))
    tree.lock(node)
    tree.unlock(node)  # most recently used
    tree.evict(3)
    assert sorted(tree.root().children) == [1, 3]
    tree.evict(1)
    assert sorted(tree.root().children) == [1]


def test_a_shared_prefix_outlives_its_branches() -> None:
    pool = SlotPool(9)
    tree = RadixTree(pool)
    stem = tree.insert(tree.root(), ids_of([1, 2, 3]), pool.allocate(3))
    for first in (4, 5):
        tree.insert(stem, ids_of([first, 9]), pool.allocate(2))
    tree.evict(4)
    _, slots = tree.descend(tree.root(), ids_of([1, 2, 3, 4]))
    assert slots.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("left", "right", "length"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 5], [1, 6], 1), ([4], [5], 0)]
)
def test_shared_length_counts_leading_ids(left: list[int], right: list[int], length: int) -> None:
    assert shared_length(ids_of(left), ids_of(right)) == length


def test_slots_are_handed_out_from_the_lowest_and_come_back() -> None:
    pool = SlotPool(5)
    first = pool.allocate(3)
    assert first.tolist() == [0, 1, 2]
    pool.free(first)
    assert pool.allocate(2).tolist() == [0, 1]
    assert pool.num_free == 3
    with pytest.raises(AssertionError, match="4 slots requested, 3 free"):
        pool.allocate(4)


def test_a_slot_freed_twice_is_noticed() -> None:
    pool = SlotPool(2)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(ids_of([1]))
