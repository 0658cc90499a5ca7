"""The overlapped loop publishes the same events in the same order as the plain loop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driven import KINDS, Driven
from logprobe.engine.backends.thread import SerialLoop
from logprobe.engine.overlap import OverlappedLoop
from logprobe.errors import ForwardError
from logprobe.transport.messages import Abort, Pause, Resume

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.transport.messages import Event

LIMIT_S = 120  # generous, also for a busy machine
PROMPTS = st.lists(st.integers(2, 5), min_size=1, max_size=20)
ARRIVALS = st.tuples(st.integers(0, 12), st.sampled_from(KINDS), PROMPTS)
ORDERS = st.tuples(st.integers(1, 20), st.sampled_from([Abort, Pause, Resume]), st.integers(0, 6))
SIZES = st.fixed_dictionaries(
    {
        "num_slots": st.integers(60, 150),
        "max_num_batched_tokens": st.integers(4, 40),
        "max_num_seqs": st.integers(1, 6),
    }
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=7),
    orders=st.lists(ORDERS, max_size=5),
    sizes=SIZES,
    failing=st.sets(st.integers(0, 15), max_size=2),
)
def test_both_loops_say_the_same(
    arrivals: list[Any], orders: list[Any], sizes: dict[str, int], failing: set[int]
) -> None:
    """Requests that arrive, stop, pause and abort at any step, in a pool too small for all of them."""

    def outputs_of(loop: type[SerialLoop | OverlappedLoop]) -> dict[str, Any]:
        driven = Driven(loop, **sizes)
        run = driven.forward.run

        def spoilt(batch: Any) -> None:
            if driven.num_steps in failing:
                raise RuntimeError(f"step {driven.num_steps} failed")
            run(batch)

        driven.forward.run = spoilt  # type: ignore[method-assign]
        return driven.play(arrivals, orders)

    assert outputs_of(OverlappedLoop) == outputs_of(SerialLoop)


@pytest.mark.parametrize("loop", [SerialLoop, OverlappedLoop])
def test_a_step_that_cannot_be_published_fails_its_requests_and_no_other(
    loop: type[SerialLoop | OverlappedLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(loop)
    events_of, calls = driven.engine.events_of, 0

    def fail_third(step: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("no room for rows")
        return events_of(step)

    monkeypatch.setattr(driven.engine, "events_of", fail_third)
    driven.submit("ends then", [5, 6], max_tokens=3, logprobs=1)
    driven.submit("ends after", [7, 8], max_tokens=4, logprobs=1)
    driven.submit("goes on", [9, 10], max_tokens=9, logprobs=1)
    for _ in range(3):
        driven.step()
    driven.submit("comes later", [11, 12], max_tokens=5, logprobs=1)
    outputs = driven.finish()
    late = outputs.pop("comes later")
    assert late.error is None
    assert len(late.outputs[0].token_ids) == 5
    for output in outputs.values():
        [one] = output.outputs
        assert isinstance(one.error, ForwardError)
        assert "no room for rows" in str(one.error)
        assert one.finish_reason == "error"
        assert len(one.token_ids) == 2, "nothing of a later step is seen"


def test_the_next_step_runs_while_the_last_one_is_published() -> None:
    driven = Driven(OverlappedLoop)
    is_publishing, go = threading.Event(), threading.Event()
    publish = driven.publish

    def slow(events: Sequence[Event]) -> None:
        is_publishing.set()
        assert go.wait(LIMIT_S)
        publish(events)

    driven.loop._publish = slow
    driven.submit("r", [5, 6], max_tokens=3, logprobs=1)
    driven.step()
    assert is_publishing.wait(LIMIT_S)
    run, has_run = driven.forward.run, threading.Event()

    def watched(batch: Any) -> None:
        run(batch)
        has_run.set()

    driven.forward.run = watched  # type: ignore[method-assign]
    stepping = threading.Thread(target=driven.step)
    stepping.start()
    assert has_run.wait(LIMIT_S), "the second step waited for the first to be told"
    assert driven.events == []
    go.set()
    stepping.join(LIMIT_S)
    assert len(driven.finish()["r"].outputs[0].token_ids) == 3


def test_what_cannot_be_published_stops_the_engine() -> None:
    """A failure to publish is a bug of ours, not of a request, so it must not pass unnoticed."""
    driven = Driven(OverlappedLoop)
    driven.submit("r", [5, 6], max_tokens=3)

    def broken(_: Sequence[Event]) -> None:
        raise ZeroDivisionError("a bug")

    driven.loop._publish = broken
    driven.step()
    with pytest.raises(ZeroDivisionError):
        driven.loop.settle()
    driven.loop.close()
