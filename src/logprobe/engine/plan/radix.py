"""Radix tree over token ids that owns the KV cache slots of all cached prefixes.

A node holds consecutive tokens and their slots. Samples lock the path that they use; unlocked nodes may be
evicted, least recently used leaves first. One tree serves all LoRA weights and both kinds of rotary
frequencies: each combination has its own root. (After RadixAttention in SGLang, Zheng et al. 2024, with a
granularity of one token.)
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from logprobe.records.values import IntArray


class SlotPool:
    """Stack of free slot numbers in [0, num_slots).

    `on_free` is called with slots that are freed, so that data cached by slot can be invalidated.
    """

    def __init__(self, num_slots: int, on_free: Callable[[IntArray], None] | None = None) -> None:
        self.num_slots = num_slots
        self._on_free = on_free
        # Allocate the lowest slots first, so that a short run touches little memory.
        self._stack: IntArray = np.arange(num_slots, dtype=np.int32)[::-1].copy()
        self.num_free = num_slots

    def allocate(self, count: int) -> IntArray:
        """Allocate and return `count` slots; the caller must ensure that enough are free."""
        assert count <= self.num_free, f"{count} slots requested, {self.num_free} free"
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def free(self, slots: IntArray) -> None:
        """Return allocated slots to the pool."""
        if not len(slots):
            return
        end = self.num_free + len(slots)
        assert end <= self.num_slots, "a slot was freed twice"
        self._stack[self.num_free : end] = slots[::-1]
        self.num_free = end
        if self._on_free is not None:
            self._on_free(slots)

    def free_slots(self) -> IntArray:
        """Return the free slots, in no particular order."""
        return self._stack[: self.num_free]


EMPTY = np.empty(0, dtype=np.int32)


@dataclass(eq=False, slots=True)
class Node:
    """Consecutive tokens below `parent`; `num_locks` counts the samples that use this or a lower node."""

    parent: Node | None
    token_ids: IntArray
    slots: IntArray
    children: dict[int, Node] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0
    born: int = 0  # number of the step that added the node

    @property
    def is_leaf(self) -> bool:
        """True if the node has no children."""
        return not self.children


def shared_length(left: IntArray, right: IntArray) -> int:
    """Return the length of the common prefix of two arrays."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


class RadixTree:
    """Cached prefixes and the slots that hold them; slots come from `pool` and are freed to `pool`."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._step = 0
        self.num_evictable = 0  # slots in unlocked nodes

    def begin_step(self) -> None:
        """Start a new step; nodes inserted from now on belong to it."""
        self._step += 1

    def forget_step(self) -> None:
        """Remove the nodes that the current step inserted, after the step failed to compute their tokens."""
        for node in [node for node in self.nodes() if node.born == self._step]:
            if node.parent is not None and node.parent.born != self._step:
                self._remove_branch(node)

    def root(self, key: Hashable = None) -> Node:
        """Return the root for `key`, on which alone cached values depend, apart from the tokens."""
        return self._roots.setdefault(key, Node(None, EMPTY, EMPTY))

    def descend(self, node: Node, token_ids: IntArray) -> tuple[Node, IntArray]:
        """Match `token_ids` below `node`; return the deepest matching node and the matched tokens' slots.

        Splits a node that matches only in part.
        """
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
        """Add tokens below `node`, which `descend` must have returned for them; return the new node.

        The tree takes ownership of `slots`. Without tokens, returns `node`.
        """
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
        """Protect `node` and its ancestors from eviction until `unlock`."""
        for step in self.path_up(node):
            if step.num_locks == 0:
                self.num_evictable -= len(step.slots)
            step.num_locks += 1

    def lock_further(self, node: Node, above: Node) -> None:
        """Extend a lock on `above` down to its descendant `node`; visits only the nodes between the two."""
        while node is not above:
            if node.num_locks == 0:
                self.num_evictable -= len(node.slots)
            node.num_locks += 1
            assert node.parent is not None, "`above` is an ancestor of `node`"
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of `node`."""
        self._clock += 1
        for step in self.path_up(node):
            assert step.num_locks > 0, "unlock without lock"
            step.num_locks -= 1
            step.last_used = self._clock
            if step.num_locks == 0:
                self.num_evictable += len(step.slots)

    def evict(self, count: int) -> None:
        """Evict the least recently used leaves until `count` slots are freed or nothing is evictable."""
        # Ties go to the first in the order of `nodes`, so that the same requests evict the same prefixes.
        order = itertools.count()
        leaves = [(node.last_used, next(order), node) for node in self.nodes() if _is_evictable(node)]
        heapq.heapify(leaves)
        while leaves and count > 0:
            _, _, leaf = heapq.heappop(leaves)
            count -= len(leaf.slots)
            parent = self._remove(leaf)
            if _is_evictable(parent):
                heapq.heappush(leaves, (parent.last_used, next(order), parent))

    def clear(self) -> None:
        """Evict every unlocked prefix."""
        self.evict(self._pool.num_slots)

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes except the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    @staticmethod
    def path_up(node: Node) -> Iterator[Node]:
        """Yield `node` and its ancestors up to, but not including, the root."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            yield step
            step = step.parent

    def _remove_branch(self, node: Node) -> None:
        for child in list(node.children.values()):
            self._remove_branch(child)
        self._remove(node)

    def _split(self, node: Node, length: int) -> Node:
        """Split a node after `length` tokens; return the new upper part.

        The lower part stays the same object, because samples may reference it.
        """
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
