"""Fair sharing of step tokens, running places and KV cache slots between callers and their calls.

A caller is a client of the server. A call is one unit of the caller's work, such as an HTTP request with all
its prompts and samples. A place allows one sample to run; there are `max_running` places.

A call that is alone may use the whole engine, and calls that fit into one step are served in order of
arrival. A call with more tokens than one step holds leaves most of each step to others. A call that holds
more than its share of places or slots loses its youngest sample to a call that holds less than its share.
Preemption raises a call at most to its share, and takes only the excess of another call, so two calls never
preempt each other in turn.

Places and slots are shared between callers first, then between each caller's calls. Within a step, the
prompts of the caller with the least work come first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from logprobe.engine.plan.sample import Sample

LARGE_PART: Final = 16
"""While other calls run, large calls get at most 1/LARGE_PART of a step's tokens and prompt rows."""
PLACES_PART: Final = 8
"""A caller or call that holds at most 1/PLACES_PART of the places is never preempted for a place."""


class StepShare:
    """Divides the tokens of one step, and the prompt positions to score, between large calls and the others.

    A large call has more work than one step holds.
    """

    def __init__(self, active: Sequence[Sample], max_num_batched_tokens: int, *, is_shared: bool) -> None:
        self._large: set[str] = set()
        self._most = max_num_batched_tokens
        self._caller_work: Counter[str] = Counter()
        if not is_shared:
            return
        work: Counter[str] = Counter()
        for sample in active:
            if sample.has_prompt_work:
                num_tokens = sample.num_tokens + sample.num_prompt_rows
                work[sample.call] += num_tokens
                self._caller_work[sample.caller] += num_tokens
        self._large = {call for call, num_tokens in work.items() if num_tokens > max_num_batched_tokens}
        if any(sample.call not in self._large for sample in active):
            self._most = max(max_num_batched_tokens // LARGE_PART, 1)

    def is_large(self, sample: Sample) -> bool:
        """Return True if the sample's call has more work than one step holds."""
        return sample.call in self._large

    def in_turn(self, active: list[Sample]) -> list[Sample]:
        """Return the samples in scheduling order: those of callers with less work first."""
        if len(self._caller_work) < 2:
            return active
        return sorted(active, key=lambda sample: self._caller_work[sample.caller])

    def split(
        self, budget: int, samples: Iterable[Sample], wanted: Callable[[Sample], int]
    ) -> dict[bool, int]:
        """Split a step's budget of tokens or rows between large calls and the others.

        Args:
            budget: number of tokens or rows to divide.
            samples: the samples that share the budget.
            wanted: returns the number that a sample can use.

        Returns:
            {False: number for small calls, True: number for large calls}.
        """
        large = 0
        if self._large:
            num_wanted = sum(wanted(sample) for sample in samples if self.is_large(sample))
            large = min(num_wanted, self._most, budget)
        return {False: budget - large, True: large}


class _Level(NamedTuple):
    """One level of sharing: between callers, or between the calls of one caller."""

    name: Callable[[Sample], str]
    num_samples: Mapping[str, int]  # unfinished samples by name of the caller or call
    num_places: int  # share of each caller or call
    num_slots: int  # share of each caller or call


class FairShares:
    """Counts callers and calls, orders waiting samples, and picks preemption victims."""

    def __init__(self, max_running: int, num_slots: int) -> None:
        self._max_running = max_running
        self._num_slots = num_slots
        # Numbers of unfinished samples.
        self._by_caller: Counter[str] = Counter()
        self._by_call: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by caller, then by call

    @property
    def num_calls(self) -> int:
        """Number of unfinished calls."""
        return sum(map(len, self._by_call.values()))

    @property
    def is_shared(self) -> bool:
        """True if more than one call is active."""
        return self.num_calls > 1

    def add(self, sample: Sample) -> None:
        """Count a new sample."""
        self._by_caller[sample.caller] += 1
        self._by_call[sample.caller][sample.call] += 1

    def end(self, sample: Sample) -> None:
        """Remove a finished sample from the counts."""
        for counts, name in (
            (self._by_caller, sample.caller),
            (self._by_call[sample.caller], sample.call),
        ):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]
        if not self._by_call[sample.caller]:
            del self._by_call[sample.caller]

    def _callers(self) -> _Level:
        count = len(self._by_caller)
        places = _places(self._max_running, count)
        return _Level(attrgetter("caller"), self._by_caller, places, self._num_slots // count)

    def _calls(self, caller: str) -> _Level:
        whole, calls = self._callers(), self._by_call[caller]
        places = _places(whole.num_places, len(calls))
        return _Level(attrgetter("call"), calls, places, whole.num_slots // len(calls))

    def next_in_line(self, waiting: Iterable[Sample], running: Sequence[Sample]) -> Sample | None:
        """Return the next waiting sample to start, or None.

        Skips callers and calls that already hold their share of places, if another does not.
        """
        first = next((sample for sample in waiting if not sample.is_paused), None)
        if first is None or not self.is_shared:
            return first
        active = [sample for sample in running if not sample.is_paused]
        first = _in_turn(
            first, (sample for sample in waiting if not sample.is_paused), active, self._callers()
        )
        first = self._next_of(first, waiting, active)
        is_alone = len(self._by_caller) == 1
        if is_alone or len(active) < self._max_running or self.gives_place(active, first):
            return first
        # This caller has its share, but a call of another caller may still be below its own.
        seen = {first.caller}
        for sample in waiting:
            if sample.is_paused or sample.caller in seen:
                continue
            seen.add(sample.caller)
            other = self._next_of(sample, waiting, active)
            if self.gives_place(active, other):
                return other
        return first

    def _next_of(self, first: Sample, waiting: Iterable[Sample], active: Iterable[Sample]) -> Sample:
        """Return `first` or, if its call has its full share, a sample of the same caller's other calls."""
        line = (sample for sample in waiting if not sample.is_paused and sample.caller == first.caller)
        own = [sample for sample in active if sample.caller == first.caller]
        return _in_turn(first, line, own, self._calls(first.caller))

    def gives_place(self, running: Sequence[Sample], sample: Sample) -> Sample | None:
        """Pick a running sample whose place the waiting `sample` takes; None: preempt no sample."""
        if not self.is_shared:
            return None
        callers, calls = self._callers(), self._calls(sample.caller)
        active = [other for other in running if not other.is_paused]
        return _giver(active, sample, 1, ((callers, callers.num_places), (calls, calls.num_places)), _one)

    def gives_slots(self, running: Sequence[Sample], sample: Sample, need: int) -> Sample | None:
        """Pick a running sample to preempt for the `need` slots of a waiting `sample`; None: preempt none."""
        if not self.is_shared:
            return None
        callers, calls = self._callers(), self._calls(sample.caller)
        shares = ((callers, callers.num_slots), (calls, calls.num_slots))
        return _giver(running, sample, need, shares, attrgetter("num_own_slots"))

    def gives_room(self, running: Sequence[Sample], touched: Collection[Sample]) -> Sample:
        """Pick a running sample to preempt when a running sample needs slots.

        In the call with the most slots, this is the youngest sample that is not in `touched` (samples with
        work planned in this step). If no call exceeds its share, it is the youngest sample of all.
        """
        if not self.is_shared:
            return running[-1]
        size, holders = attrgetter("num_own_slots"), running
        callers = self._callers()
        most, of_caller = _largest(running, callers.name, size)
        is_over = most > callers.num_slots
        if is_over:
            holders = of_caller
        most, of_call = _largest(holders, attrgetter("call"), size)
        if not is_over and most <= self._num_slots // self.num_calls:
            return running[-1]
        return next(
            (sample for sample in reversed(of_call) if size(sample) and sample not in touched), running[-1]
        )


def _places(total: int, parties: int) -> int:
    """Return one party's share of `total` places: at least 1 and at least `total // PLACES_PART`.

    The minimum keeps small calls in their order of arrival.
    """
    return max(total // min(parties, PLACES_PART), 1)


def _in_turn(first: Sample, line: Iterable[Sample], active: Sequence[Sample], level: _Level) -> Sample:
    """Return `first`, unless its party has its full share: then the first sample of a party below that.

    A party is a caller or a call, as `level` says.
    """
    held = Counter(map(level.name, active))
    waits = any(held[name] < min(level.num_places, count) for name, count in level.num_samples.items())
    if held[level.name(first)] < level.num_places or not waits:
        return first
    return next((sample for sample in line if held[level.name(sample)] < level.num_places), first)


def _giver(
    holders: Sequence[Sample],
    sample: Sample,
    need: int,
    shares: Iterable[tuple[_Level, int]],
    size: Callable[[Sample], int],
) -> Sample | None:
    """Pick the youngest sample of the largest party above its share; None if there is none.

    A party is a caller or a call. None is picked if `need` more would take the party of `sample` above its
    own share.
    """
    for level, share in shares:
        own = sum(size(holder) for holder in holders if level.name(holder) == level.name(sample))
        most, largest = _largest(holders, level.name, size)
        if own + need <= share < most:
            _, of_call = _largest(largest, attrgetter("call"), size)
            return next(holder for holder in reversed(of_call) if size(holder))
        holders = [holder for holder in holders if holder.caller == sample.caller]
    return None


def _largest(
    holders: Sequence[Sample], name: Callable[[Sample], str], size: Callable[[Sample], int]
) -> tuple[int, list[Sample]]:
    """Return the size and the samples of the party that holds most; of equal parties, the oldest."""
    held: Counter[str] = Counter()
    for holder in holders:
        held[name(holder)] += size(holder)
    party, most = max(held.items(), key=lambda item: item[1], default=("", 0))
    return most, [holder for holder in holders if name(holder) == party]


def _one(_: Sample) -> int:
    return 1
