"""What each call may take of the engine while others wait: of a step, of its places, and of its slots.

A call is what one front door asks at once: an HTTP request, say, with all its prompts and samples. While
there is one alone it takes all there is, and calls that fit into a step are served as they came. One that
asks for more than a step's tokens leaves most of each step to the others; one that holds more than its share
of the places or of the slots gives up its youngest sample for a call that holds less than its own share. A
call takes by force only up to its share and loses only what is beyond it, so two never take in turn.

Before it: the scheduler's samples. After it: the scheduler.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from logprobe.engine.plan.sample import Sample

LARGE_PART: Final = 16
"""Of a step's tokens, and of its prompt rows, large calls have one in this many beside others."""
PLACES_PART: Final = 8
"""A call that holds no more of the places than one in this many is let be."""


class StepShare:
    """How one step's tokens, and its prompt rows, are shared between large calls and the others."""

    def __init__(self, active: Sequence[Sample], max_batch_tokens: int, *, is_shared: bool) -> None:
        self._large: set[str] = set()
        self._most = max_batch_tokens
        if not is_shared:
            return
        work: Counter[str] = Counter()
        for sample in active:
            if sample.has_prompt_work:
                work[sample.call] += sample.num_tokens + sample.num_prompt_rows
        self._large = {call for call, num_tokens in work.items() if num_tokens > max_batch_tokens}
        if any(sample.call not in self._large for sample in active):
            self._most = max(max_batch_tokens // LARGE_PART, 1)

    def is_large(self, sample: Sample) -> bool:
        """Whether it belongs to a call that asks for more than a step."""
        return sample.call in self._large

    def split(
        self, budget: int, samples: Iterable[Sample], wanted: Callable[[Sample], int]
    ) -> dict[bool, int]:
        """A budget as (small, large): what large calls want, as far as they may have it, and the rest."""
        large = 0
        if self._large:
            num_wanted = sum(wanted(sample) for sample in samples if self.is_large(sample))
            large = min(num_wanted, self._most, budget)
        return {False: budget - large, True: large}


class Shares:
    """Counts calls and finds who gives way."""

    def __init__(self, max_running: int, num_slots: int) -> None:
        self._max_running = max_running
        self._num_slots = num_slots
        self._num_samples: Counter[str] = Counter()  # by call, of those that have not ended

    @property
    def is_shared(self) -> bool:
        """Whether more than one call is here."""
        return len(self._num_samples) > 1

    def add(self, sample: Sample) -> None:
        """Count a sample that has come."""
        self._num_samples[sample.call] += 1

    def end(self, sample: Sample) -> None:
        """Count one that has ended."""
        self._num_samples[sample.call] -= 1
        if not self._num_samples[sample.call]:
            del self._num_samples[sample.call]

    @property
    def num_places(self) -> int:
        """A call's share of the places: few samples more are let be, for the sake of their order."""
        parts = min(len(self._num_samples), PLACES_PART)
        return max(self._max_running // max(parts, 1), 1)

    def next_in_line(self, waiting: Iterable[Sample], running: Sequence[Sample]) -> Sample | None:
        """The first that waits; where its call holds its share already, the first of one that does not."""
        line = (sample for sample in waiting if not sample.is_paused)
        first = next(line, None)
        if first is None or not self.is_shared:
            return first
        held = Counter(sample.call for sample in running if not sample.is_paused)
        if held[first.call] < self.num_places or not self._waits_below_share(held):
            return first
        return next((sample for sample in line if held[sample.call] < self.num_places), first)

    def _waits_below_share(self, held: Counter[str]) -> bool:
        return any(held[call] < min(self.num_places, count) for call, count in self._num_samples.items())

    def gives_place(self, running: Sequence[Sample], sample: Sample) -> Sample | None:
        """The sample that gives its place to one that waits; None where none has to."""
        if not self.is_shared:
            return None
        held = Counter(one.call for one in running if not one.is_paused)
        call, most = max(held.items(), key=lambda item: item[1])
        if held[sample.call] >= self.num_places or most <= self.num_places:
            return None
        return next(one for one in reversed(running) if one.call == call and not one.is_paused)

    def gives_slots(self, running: Sequence[Sample], sample: Sample, need: int) -> Sample | None:
        """The sample that gives its slots to one that waits and needs so many; None where none has to."""
        if not self.is_shared or not running:
            return None
        held, share = _held_slots(running), self._num_slots // len(self._num_samples)
        call, most = max(held.items(), key=lambda item: item[1])
        if held[sample.call] + need > share or most <= share:
            return None
        return next(one for one in reversed(running) if one.call == call and one.num_own_slots)

    def gives_room(self, running: Sequence[Sample], touched: Collection[Sample]) -> Sample:
        """The sample to preempt where a running one needs a slot: the youngest, of the call that has most."""
        if not self.is_shared:
            return running[-1]
        call, most = max(_held_slots(running).items(), key=lambda item: item[1])
        if most <= self._num_slots // len(self._num_samples):
            return running[-1]
        holders = (one for one in reversed(running) if one.call == call and one.num_own_slots)
        return next((one for one in holders if one not in touched), running[-1])


def _held_slots(running: Sequence[Sample]) -> Counter[str]:
    held: Counter[str] = Counter()
    for sample in running:
        held[sample.call] += sample.num_own_slots
    return held
