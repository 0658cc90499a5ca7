"""The slots of the key/value pool that nobody owns: one slot holds one token.

Before it: the scheduler, which needs slots. After it: the radix tree and the sequences, which own them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


class SlotPool:
    """A stack of free slot numbers in [0, num_slots)."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
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
        end = self.num_free + len(slots)
        assert end <= self.num_slots, "a slot was freed twice"
        self._stack[self.num_free : end] = slots[::-1]
        self.num_free = end

    def free_slots(self) -> IntArray:
        """The free slots, in no particular order."""
        return self._stack[: self.num_free]
