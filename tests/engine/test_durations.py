"""Duration histograms, and their sums over several engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from logprobe.engine.durations import BUCKETS_S, Durations
from logprobe.engine.protocol import EngineStats


def test_each_length_is_counted_where_prometheus_counts_it() -> None:
    lasted = Durations()
    for seconds in (0.0, BUCKETS_S[0], 0.0011, BUCKETS_S[-1], 1e6):
        lasted.add(seconds)
    assert lasted.counts == [2, 1, *[0] * (len(BUCKETS_S) - 3), 1, 1]  # bounds are inclusive
    assert lasted.seconds == pytest.approx(1e6 + BUCKETS_S[0] + 0.0011 + BUCKETS_S[-1])


def test_a_copy_stays_as_it_was() -> None:
    lasted = Durations()
    kept = lasted.copy()
    lasted.add(1.0)
    assert (sum(kept.counts), kept.seconds) == (0, 0.0)


def test_several_engines_have_their_sums() -> None:
    one, other = (EngineStats.of_replicas({}) for _ in range(2))  # neither is running
    for stats, waits in ((one, [0.5, 3.0]), (other, [0.5])):
        stats.durations["queue"] = Durations()
        for seconds in waits:
            stats.durations["queue"].add(seconds)
    both = EngineStats.of_replicas({"a": replace(one, is_up=True), "b": other})
    assert sum(both.durations["queue"].counts) == 3
    assert both.durations["queue"].seconds == 4.0
    assert sum(one.durations["queue"].counts) == 2
    assert both.is_up


@pytest.mark.parametrize("states", [[False], [False, False]])
def test_engines_of_which_none_takes_requests_are_not_up(states: list[bool]) -> None:
    nothing = replace(EngineStats.of_replicas({}), is_up=True)
    parts = {str(number): replace(nothing, is_up=is_up) for number, is_up in enumerate(states)}
    assert not EngineStats.of_replicas(parts).is_up
