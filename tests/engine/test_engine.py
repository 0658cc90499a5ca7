"""The engine as a whole: in any mix, each request gets what it gets alone on an engine with empty caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_SLOTS = 120  # of the engine that runs requests alone
STEMS = ([5, 6, 7, 8, 9] * 5, [5, 6, 7, 100, 101, 102] * 4, [40])


@st.composite
def prompts(draw: Any) -> list[int]:
    stem = draw(st.sampled_from(STEMS))
    ids = stem[: draw(st.integers(0, len(stem)))] + draw(st.lists(st.integers(2, 250), max_size=30))
    return ids or [3]


@st.composite
def params(draw: Any) -> dict[str, Any]:
    counts = st.sampled_from([None, None, 0, 1, 5, -1])
    asked = {
        "max_tokens": draw(st.integers(0, 12)),
        "logprobs": draw(counts),
        "prompt_logprobs": draw(counts),
        "logprobs_mode": draw(st.sampled_from(["raw_logprobs", "processed_logprobs", "both"])),
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        "top_k": draw(st.sampled_from([0, 0, 1, 20])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.8])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.05])),
        "seed": draw(st.integers(0, 2**40)),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "stop_token_ids": draw(st.lists(st.integers(0, 285), max_size=5)),
        "ignore_eos": draw(st.booleans()),
    }
    if asked["max_tokens"]:
        asked["best_of"] = draw(st.sampled_from([None, None, asked["n"] + 1]))
        asked["stop"] = draw(st.lists(st.sampled_from(["a", "th", "\u00e9", "1"]), max_size=2))
    is_reported = asked["logprobs"] is not None or asked["prompt_logprobs"] is not None
    asked["entropy"] = is_reported and draw(st.booleans())
    if is_reported and draw(st.booleans()):
        asked["logprob_token_ids"] = draw(st.lists(st.integers(0, 285), max_size=4))
    return asked


@st.composite
def mixes(draw: Any) -> dict[str, Any]:
    asked = draw(st.lists(st.tuples(prompts(), params(), st.integers(0, 12)), min_size=1, max_size=6))
    longest = max(len(ids) + one["max_tokens"] for ids, one, _ in asked)
    return {
        "asked": asked,
        "num_slots": max(longest, draw(st.integers(40, 80))),
        "max_num_batched_tokens": draw(st.integers(4, 64)),
        "max_num_seqs": draw(st.integers(1, 8)),
        "abort": draw(st.none() | st.tuples(st.integers(0, 5), st.integers(0, 20))),
    }


def run_mix(engine: Any, mix: dict[str, Any]) -> None:
    aborted, abort_at = mix["abort"] or (None, None)
    arrivals = [(arrival, f"r{index}", index) for index, (_, _, arrival) in enumerate(mix["asked"])]
    waiting = sorted(arrivals)
    while waiting or engine.engine.has_work:
        while waiting and (waiting[0][0] <= engine.num_steps or not engine.engine.has_work):
            _, name, index = waiting.pop(0)
            ids, asked, _ = mix["asked"][index]
            engine.submit(name, ids, **asked)
        if engine.num_steps == abort_at and f"r{aborted}" in engine.outputs:
            engine.abort(f"r{aborted}")
        engine.step()
        assert engine.num_steps < 5000, "the engine makes no progress"


def assert_each_gives_what_it_gives_alone(
    make: Callable[..., Any], assert_same: Callable[..., None], mix: dict[str, Any]
) -> None:
    limits = {name: mix[name] for name in ("max_num_batched_tokens", "max_num_seqs")}
    together = make(mix["num_slots"], **limits)
    run_mix(together, mix)
    together.assert_idle()
    assert set(together.num_ends.values()) == {1}
    for index, (ids, asked, _) in enumerate(mix["asked"]):
        got = together.outputs[f"r{index}"]
        if any(one.finish_reason == "abort" for one in got.outputs):
            continue
        alone = make(NUM_SLOTS)
        want = alone.submit("alone", ids, **asked)
        alone.run()
        assert_same(got, want)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(mix=mixes())
def test_a_request_among_others_gives_what_it_gives_alone(
    new_engine: Callable[..., Any], assert_same: Callable[..., None], mix: dict[str, Any]
) -> None:
    assert_each_gives_what_it_gives_alone(new_engine, assert_same, mix)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(mix=mixes())
def test_the_same_holds_for_windows_and_squashed_scores(
    new_window_engine: Callable[..., Any], assert_same: Callable[..., None], mix: dict[str, Any]
) -> None:
    assert_each_gives_what_it_gives_alone(new_window_engine, assert_same, mix)
