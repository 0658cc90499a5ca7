"""What each caller and each call may take of the engine while others wait: of a step, its places, its slots.

A call is what one front door asks at once: an HTTP request, say, with all its prompts and samples. While
there is one alone it takes all there is, and calls that fit into a step are served as they came. One that
asks for more than a step's tokens leaves most of each step to the others; one that holds more than its share
of the places or of the slots gives up its youngest sample for a call that holds less than its own share. A
call takes by force only up to its share and loses only what is beyond it, so two never take in turn.

Callers are who calls: a server tells its clients apart, whatever each of them calls. Places and slots are
shared between callers first, then what a caller has between its calls; in a step, the prompts of a caller
that has less to run come first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from logprobe.engine.plan.sample import Sample

LARGE_PART: Final = 16
"""Of a step's tokens, and of its prompt rows, large calls have one in this many beside others."""
PLACES_PART: Final = 8
"""A caller, or a call, that holds no more of the places than one in this many is let be."""


class StepShare:
    """How one step's tokens, and its prompt rows, are shared between large calls and the others."""

    def __init__(self, active: Sequence[Sample], max_batch_tokens: int, *, is_shared: bool) -> None:
        self._large: set[str] = set()
        self._most = max_batch_tokens
        self._caller_work: Counter[str] = Counter()
        if not is_shared:
            return
        work: Counter[str] = Counter()
        for sample in active:
            if sample.has_prompt_work:
                num_tokens = sample.num_tokens + sample.num_prompt_rows
                work[sample.call] += num_tokens
                self._caller_work[sample.caller] += num_tokens
        self._large = {call for call, num_tokens in work.items() if num_tokens > max_batch_tokens}
        if any(sample.call not in self._large for sample in active):
            self._most = max(max_batch_tokens // LARGE_PART, 1)

    def is_large(self, sample: Sample) -> bool:
        """Whether it belongs to a call that asks for more than a step."""
        return sample.call in self._large

    def in_turn(self, active: list[Sample]) -> list[Sample]:
        """The samples in the order in which they take of the step: callers with less to run come first."""
        if len(self._caller_work) < 2:
            return active
        return sorted(active, key=lambda sample: self._caller_work[sample.caller])

    def split(
        self, budget: int, samples: Iterable[Sample], wanted: Callable[[Sample], int]
    ) -> dict[bool, int]:
        """A budget as (small, large): what large calls want, as far as they may have it, and the rest."""
        large = 0
        if self._large:
            num_wanted = sum(wanted(sample) for sample in samples if self.is_large(sample))
            large = min(num_wanted, self._most, budget)
        return {False: budget - large, True: large}


class _Level(NamedTuple):
    """Callers, or the calls of one caller, and what each may have while others wait."""

    name: Callable[[Sample], str]
    num_samples: Mapping[str, int]  # by name, of those that have not ended
    num_places: int
    num_slots: int


class FairShares:
    """Counts callers and calls, and finds who gives way."""

    def __init__(self, max_running: int, num_slots: int) -> None:
        self._max_running = max_running
        self._num_slots = num_slots
        # Samples that have not ended.
        self._by_caller: Counter[str] = Counter()
        self._by_call: defaultdict[str, Counter[str]] = defaultdict(Counter)  # of each caller

    @property
    def num_calls(self) -> int:
        """Calls that have not ended."""
        return sum(map(len, self._by_call.values()))

    @property
    def is_shared(self) -> bool:
        """Whether more than one call is here."""
        return self.num_calls > 1

    def add(self, sample: Sample) -> None:
        """Count a sample that has come."""
        self._by_caller[sample.caller] += 1
        self._by_call[sample.caller][sample.call] += 1

    def end(self, sample: Sample) -> None:
        """Count one that has ended."""
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
        """The first that waits; where its caller, or call, holds its share already, the first of another."""
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
        # Its caller has its share, but the calls of another caller may not share alike what that one has.
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
        """`first`; where its call holds its share of what their caller has, the first of another one."""
        line = (sample for sample in waiting if not sample.is_paused and sample.caller == first.caller)
        own = [sample for sample in active if sample.caller == first.caller]
        return _in_turn(first, line, own, self._calls(first.caller))

    def gives_place(self, running: Sequence[Sample], sample: Sample) -> Sample | None:
        """The sample that gives its place to one that waits; None where none has to."""
        if not self.is_shared:
            return None
        callers, calls = self._callers(), self._calls(sample.caller)
        active = [other for other in running if not other.is_paused]
        return _giver(active, sample, 1, ((callers, callers.num_places), (calls, calls.num_places)), _one)

    def gives_slots(self, running: Sequence[Sample], sample: Sample, need: int) -> Sample | None:
        """The sample that gives its slots to one that waits and needs so many; None where none has to."""
        if not self.is_shared:
            return None
        callers, calls = self._callers(), self._calls(sample.caller)
        shares = ((callers, callers.num_slots), (calls, calls.num_slots))
        return _giver(running, sample, need, shares, attrgetter("num_own_slots"))

    def gives_room(self, running: Sequence[Sample], touched: Collection[Sample]) -> Sample:
        """The sample to preempt where a running one needs a slot: the youngest, of the call that has most."""
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
    """A share of places: few samples more are let be, for the sake of their order."""
    return max(total // min(parties, PLACES_PART), 1)


def _in_turn(first: Sample, line: Iterable[Sample], active: Sequence[Sample], level: _Level) -> Sample:
    """`first`; where its party holds its share, and another does not, the first of one that does not."""
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
    """The youngest of what holds over a share, where `sample` would hold one at most; None: nobody."""
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
    """What the party that holds most has, and its samples; the oldest of equals."""
    held: Counter[str] = Counter()
    for holder in holders:
        held[name(holder)] += size(holder)
    party, most = max(held.items(), key=lambda item: item[1], default=("", 0))
    return most, [holder for holder in holders if name(holder) == party]


def _one(_: Sample) -> int:
    return 1
