"""Speculation changes only the number of steps: tokens, numbers and finish reasons stay the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driven import KINDS, Driven, told
from logprobe.engine.backends.thread import SerialLoop
from logprobe.engine.overlap import OverlappedLoop
from logprobe.testing import FakeForward
from logprobe.transport.messages import Abort, Pause, Resume

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_USUAL = 8  # tokens that have a usual successor


class Repeating(FakeForward):
    """A fake model that mostly repeats the same successor, with numbers that depend on the whole prefix."""

    def _state_of(self, token_ids: Sequence[int]) -> int:
        state = super()._state_of(token_ids)
        return state - state % NUM_USUAL + (3 * token_ids[-1] + 1) % NUM_USUAL

    def _logits_of(self, state: int) -> Any:
        logits = super()._logits_of(state)
        logits[97 + state % NUM_USUAL] += 14
        return logits


def speculating(**more: Any) -> Driven:
    num_slots = more.pop("num_slots", 300)
    return Driven(forward=Repeating(num_slots=num_slots), **{"speculate": True} | more)


LONG: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 60, "logprobs": 2},
    {"temperature": 0.9, "seed": 3, "max_tokens": 60, "logprobs": 1, "entropy": True},
    {"n": 3, "seed": 4, "max_tokens": 40, "logprobs": 1, "prompt_logprobs": 1},
    {"n": 2, "best_of": 3, "seed": 4, "max_tokens": 40},
    {"temperature": 0, "max_tokens": 60, "stop": ["bea", "dhe"], "min_tokens": 20},
    {"temperature": 0, "max_tokens": 60, "stop_token_ids": [100], "ignore_eos": False},
    {
        "logprobs": 2,
        "logprobs_mode": "both",
        "kept_ids": True,
        "top_p": 0.8,
        "seed": 6,
        "max_tokens": 40,
        "logprob_token_ids": [97, 5],
    },
    {
        "logit_bias": {100: 2.0},
        "bad_words": ["be"],
        "min_tokens": 9,
        "explain": True,
        "logprobs": 2,
        "logprobs_mode": "processed_logprobs",
        "seed": 1,
        "max_tokens": 40,
    },
    {"repetition_penalty": 1.2, "seed": 2, "max_tokens": 20, "logprobs": 1},
]


@pytest.mark.parametrize("params", [one for one in LONG if "logprobs" in one])
def test_rows_of_drafts_that_lie_in_two_chunks_come_together(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = speculating()
    want.submit("r", [5, 97, 98, 101], **params)
    outputs = want.finish()
    monkeypatch.setattr("logprobe.engine.sampling_stage.default_chunk_rows", lambda *_: 2)
    got = speculating()
    got.submit("r", [5, 97, 98, 101], **params)
    assert told(got.finish()["r"]) == told(outputs["r"])
    assert got.num_steps == want.num_steps


@pytest.mark.parametrize("params", LONG)
@pytest.mark.parametrize("loop", [SerialLoop, OverlappedLoop])
def test_a_request_alone_ends_the_same_and_sooner(params: dict[str, Any], loop: Any) -> None:
    got, want = speculating(loop=loop), speculating(speculate=False)
    for driven in (got, want):
        driven.submit("r", [5, 97, 98, 101], **params)
    output, plain = got.finish()["r"], want.finish()["r"]
    assert told(output) == told(plain)
    assert {one.drafts for one in plain.outputs} == {None}
    drafts: Any = [one.drafts for one in output.outputs]
    if "repetition_penalty" in params:
        assert all(one.num_drafted == 0 and "Penalties" in one.refusal for one in drafts)
    else:
        assert got.num_steps < want.num_steps
        assert all(0 <= one.num_accepted <= one.num_drafted for one in drafts)


# A row with entropy in a step changes the summation order of all its rows.
MIXED = [params for params in [*LONG, *KINDS] if "entropy" not in params]
ARRIVALS = st.tuples(
    st.integers(0, 12),
    st.sampled_from(MIXED),
    st.lists(st.integers(97, 97 + NUM_USUAL - 1), min_size=1, max_size=20),
)
ORDERS = st.tuples(st.integers(1, 20), st.sampled_from([Pause, Resume]), st.integers(0, 6))
SIZES = st.fixed_dictionaries(
    {
        "num_slots": st.integers(110, 250),
        "max_num_batched_tokens": st.integers(4, 40),
        "max_num_seqs": st.integers(1, 20),
    }
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=5),
    orders=st.lists(ORDERS, max_size=5),
    sizes=SIZES,
    loop=st.sampled_from([SerialLoop, OverlappedLoop]),
)
def test_many_requests_end_the_same(
    arrivals: list[Any], orders: list[Any], sizes: dict[str, int], loop: Any
) -> None:
    """Requests that arrive and pause at any step, in a pool too small for all; slots are checked."""

    def outputs_of(driven: Driven) -> dict[str, Any]:
        counts: list[int] = []
        run = driven.forward.run

        def counted(batch: Any) -> None:
            counts.append(len(batch.token_ids))
            run(batch)

        driven.forward.run = counted  # type: ignore[method-assign]
        outputs = driven.play(arrivals, orders)
        assert max(counts, default=0) <= sizes["max_num_batched_tokens"]
        return outputs

    got = outputs_of(speculating(loop=loop, **sizes))
    assert got == outputs_of(speculating(speculate=False, **sizes))


def test_a_step_that_fails_with_drafts_ends_its_requests_and_leaves_every_slot_to_its_owner() -> None:
    driven = speculating()
    driven.submit("fails", [5, 97, 98], temperature=0, max_tokens=60)
    head, num_rows = driven.forward.head, 0

    def spoilt(hidden: Any) -> Any:
        nonlocal num_rows
        num_rows = len(hidden)
        if num_rows > 2:
            raise RuntimeError("no")
        return head(hidden)

    driven.forward.head = spoilt  # type: ignore[method-assign]
    while driven.engine.has_work:
        driven.step()
    assert num_rows > 2, "nothing was drafted"
    driven.forward.head = head  # type: ignore[method-assign]
    driven.submit("goes on", [5, 97, 98], temperature=0, max_tokens=60)
    outputs = driven.finish()
    assert outputs["fails"].error is not None
    twin = speculating(speculate=False)
    twin.submit("r", [5, 97, 98], temperature=0, max_tokens=60)
    assert told(outputs["goes on"]) == told(twin.finish()["r"])


def test_wrong_drafts_leave_no_trace_in_the_prefix_cache() -> None:
    driven = speculating()
    params = {"temperature": 1.5, "seed": 1, "max_tokens": 50}
    driven.submit("r", [5, 97, 98, 101], **params)
    output = driven.finish()["r"].outputs[0]
    assert 0 < output.drafts.num_accepted < output.drafts.num_drafted, "no draft was wrong"
    known = {tuple(node.token_ids.tolist()) for node in driven.engine.scheduler.tree.nodes()}
    # The last token is never run; those before it are one path.
    assert sum(map(len, known)) == 4 + 50 - 1
    ids = [5, 97, 98, 101, *output.token_ids[:-1]]
    tree = driven.engine.scheduler.tree
    assert len(tree.descend(tree.root((None, False)), ids)[1]) == len(ids)


def test_an_aborted_request_ends_between_drafts() -> None:
    driven = speculating()
    driven.submit("r", [5, 97, 98, 101], temperature=0, max_tokens=200)
    for _ in range(12):
        driven.step()
    driven.handle(Abort("r"))
    output = driven.finish()["r"].outputs[0]
    assert output.finish_reason == "abort"
    assert output.drafts.num_accepted > 0
    assert len(output.token_ids) > 12


def test_a_text_does_not_become_long_by_its_drafts() -> None:
    """Beyond the boundary all keys differ; up to it each step is of one kind."""
    driven, plain = speculating(), speculating(speculate=False)
    for one in (driven, plain):
        one.engine.scheduler._rope_boundary = 40
        one.submit("r", [5, 97, 98, 101], temperature=0, max_tokens=80, logprobs=1)
    seen: list[tuple[bool, int]] = []
    run = driven.forward.run

    def watched(batch: Any) -> None:
        seen.extend((batch.are_long[0], int(place) + 1) for place in batch.positions)
        run(batch)

    driven.forward.run = watched  # type: ignore[method-assign]
    assert told(driven.finish()["r"]) == told(plain.finish()["r"])
    assert max(length for is_long, length in seen if not is_long) == 40
    assert driven.num_steps < plain.num_steps


def test_the_stats_tell_of_drafts() -> None:
    driven = speculating()
    driven.submit("r", [5, 97, 98, 101], temperature=0, max_tokens=60, logprobs=1)
    output = driven.finish()["r"].outputs[0]
    stats = driven.engine.stats()
    assert stats.drafted_tokens == output.drafts.num_drafted > 0
    assert stats.accepted_tokens == output.drafts.num_accepted > 0
