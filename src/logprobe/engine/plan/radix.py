"""The radix tree over token ids that owns the slots of every known prefix.

A node holds a run of tokens and the slot of each. Sequences lock the path they stand on; what nobody
locks may be evicted, least recently used leaves first. One tree serves all LoRA weights and both kinds
of rotary frequencies: each load of weights, under each kind, has its own root. (The idea is SGLang's
RadixAttention, Zheng et al. 2024, at the grain of one token.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from logprobe.records.values import IntArray


class SlotPool:
    """A stack of free slot numbers in [0, num_slots); `on_free` takes those that are given back.

    A slot is handed out again only after it was given back, so that what is kept beside slots ends there.
    """

    def __init__(self, num_slots: int, on_free: Callable[[IntArray], None] | None = None) -> None:
        self.num_slots = num_slots
        self._on_free = on_free
        # The lowest slots are handed out first, so that a short run touches little memory.
        self._stack: IntArray = np.arange(num_slots, dtype=np.int32)[::-1].copy()
        self.num_free = num_slots

    def allocate(self, count: int) -> IntArray:
        """Take `count` slots; the caller has made sure that so many are free."""
        assert count <= self.num_free, f"{count} slots asked, {self.num_free} free"
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def free(self, slots: IntArray) -> None:
        """Give slots back."""
        if not len(slots):
            return
        end = self.num_free + len(slots)
        assert end <= self.num_slots, "a slot was freed twice"
        self._stack[self.num_free : end] = slots[::-1]
        self.num_free = end
        if self._on_free is not None:
            self._on_free(slots)

    def free_slots(self) -> IntArray:
        """The free slots, in no particular order."""
        return self._stack[: self.num_free]


EMPTY = np.empty(0, dtype=np.int32)


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens below `parent`; `num_locks` counts the samples that stand on or below it."""

    parent: Node | None
    token_ids: IntArray
    slots: IntArray
    children: dict[int, Node] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0
    born: int = 0  # the step that planned it

    @property
    def is_leaf(self) -> bool:
        """Whether nothing stands below."""
        return not self.children


def shared_length(left: IntArray, right: IntArray) -> int:
    """How many leading ids two arrays share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


class RadixTree:
    """Known prefixes and their slots; every slot it holds came from `pool` and goes back there."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._step = 0
        self.num_evictable = 0  # slots in nodes that nobody locks

    def begin_step(self) -> None:
        """Mark what is inserted from now on as this step's."""
        self._step += 1

    def forget_step(self) -> None:
        """Remove what the current step inserted: its tokens were never computed."""
        for node in [node for node in self.nodes() if node.born == self._step]:
            if node.parent is not None and node.parent.born != self._step:
                self._remove_branch(node)

    def root(self, key: Hashable = None) -> Node:
        """Where all prefixes of one kind begin; `key` is all but the tokens that their numbers depend on."""
        return self._roots.setdefault(key, Node(None, EMPTY, EMPTY))

    def descend(self, node: Node, token_ids: IntArray) -> tuple[Node, IntArray]:
        """The deepest node below `node` on the way of `token_ids`, and the slots of the tokens passed."""
        passed: list[IntArray] = []
        while len(token_ids):
            child = node.children.get(int(token_ids[0]))
            if child is None:
                break
            length = shared_length(child.token_ids, token_ids)
            node = child if length == len(child.token_ids) else self._split(child, length)
            passed.append(node.slots)
            token_ids = token_ids[length:]
        return node, np.concatenate(passed) if passed else EMPTY

    def insert(self, node: Node, token_ids: IntArray, slots: IntArray) -> Node:
        """Hang a run below `node`, where `descend` found no way on; the tree now owns its slots."""
        if not len(token_ids):
            return node
        first = int(token_ids[0])
        assert first not in node.children, "descend before insert"
        self._clock += 1
        child = Node(node, token_ids, slots, last_used=self._clock, born=self._step)
        node.children[first] = child
        self.num_evictable += len(slots)
        return child

    def lock(self, node: Node) -> None:
        """Keep the path down to `node` from eviction, until `unlock`."""
        for step in self.path_up(node):
            if step.num_locks == 0:
                self.num_evictable -= len(step.slots)
            step.num_locks += 1

    def lock_further(self, node: Node, above: Node) -> None:
        """`lock(node)` and `unlock(above)`, where `above` is on the way: only what is between is walked."""
        while node is not above:
            if node.num_locks == 0:
                self.num_evictable -= len(node.slots)
            node.num_locks += 1
            assert node.parent is not None, "`above` is on the way"
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        self._clock += 1
        for step in self.path_up(node):
            assert step.num_locks > 0, "unlock without lock"
            step.num_locks -= 1
            step.last_used = self._clock
            if step.num_locks == 0:
                self.num_evictable += len(step.slots)

    def evict(self, count: int) -> None:
        """Free at least `count` slots where so many are evictable, least recently used leaves first."""
        leaves = [(node.last_used, id(node), node) for node in self.nodes() if _is_evictable(node)]
        heapq.heapify(leaves)
        while leaves and count > 0:
            _, _, leaf = heapq.heappop(leaves)
            count -= len(leaf.slots)
            parent = self._remove(leaf)
            if _is_evictable(parent):
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))

    def clear(self) -> None:
        """Forget every prefix that nobody locks."""
        self.evict(self._pool.num_slots)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    @staticmethod
    def path_up(node: Node) -> Iterator[Node]:
        """The nodes from `node` up to, and without, its root."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            yield step
            step = step.parent

    def _remove_branch(self, node: Node) -> None:
        for child in list(node.children.values()):
            self._remove_branch(child)
        self._remove(node)

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node in two; the lower part stays the same object, for those who stand on it."""
        assert node.parent is not None
        upper = Node(node.parent, node.token_ids[:length], node.slots[:length], num_locks=node.num_locks)
        upper.last_used, upper.born = node.last_used, node.born
        node.parent.children[int(node.token_ids[0])] = upper
        node.token_ids, node.slots, node.parent = node.token_ids[length:], node.slots[length:], upper
        upper.children[int(node.token_ids[0])] = node
        return upper

    def _remove(self, leaf: Node) -> Node:
        assert leaf.parent is not None
        assert leaf.is_leaf
        assert leaf.num_locks == 0
        del leaf.parent.children[int(leaf.token_ids[0])]
        self.num_evictable -= len(leaf.slots)
        self._pool.free(leaf.slots)
        return leaf.parent


def _is_evictable(node: Node) -> bool:
    return node.is_leaf and node.num_locks == 0 and node.parent is not None
