"""Scheduling: fairness, preemption, prefixes shared within a step, and step limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logprobe.transport.messages import Pause, Resume

if TYPE_CHECKING:
    from collections.abc import Callable

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def test_prompts_of_one_step_share_their_prefix(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(400, max_num_batched_tokens=256)
    stem = list(range(2, 42))
    for index in range(5):
        engine.submit(f"r{index}", [*stem, 100 + index, 50], max_tokens=1, **GREEDY)
    engine.step()
    assert engine.forward.num_tokens_run == 40 + 5 * 2
    assert engine.scheduler.num_cached_tokens == 4 * 40
    engine.run()
    engine.assert_idle()


def test_an_output_counts_the_prompt_tokens_that_the_cache_had(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(400, max_num_batched_tokens=16)  # prompts run in chunks, and share cached prefixes
    stem = list(range(2, 42))
    asked = {"max_tokens": 2, **GREEDY}
    outputs = [engine.submit(f"r{index}", [*stem, 100 + index, 50], **asked) for index in range(3)]
    several = engine.submit("several", [*stem, 100, 60], n=3, temperature=1.0, max_tokens=2)
    scored = engine.submit("scored", [*stem, 110], max_tokens=0, prompt_logprobs=0)
    assert outputs[0].num_cached_tokens is None
    engine.run()
    assert [output.num_cached_tokens for output in outputs] == [0, 40, 40]
    assert several.num_cached_tokens == 41  # for its first sample only
    assert scored.num_cached_tokens == 40
    again = engine.submit("again", [*stem, 100, 50], **asked)
    engine.run()
    assert again.num_cached_tokens == 42


def test_shared_prefixes_give_the_numbers_of_a_cold_engine(
    new_engine: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    engine = new_engine(400, max_num_batched_tokens=256)
    stem = list(range(2, 42))
    asked = {"max_tokens": 3, "logprobs": 5, "prompt_logprobs": 3, **GREEDY}
    prompts = [[*stem, 100 + index, 50] for index in range(4)]
    got = [engine.submit(f"r{index}", ids, **asked) for index, ids in enumerate(prompts)]
    engine.run()
    for ids, mine in zip(prompts, got, strict=True):
        alone = new_engine(400)
        want = alone.submit("alone", ids, **asked)
        alone.run()
        assert_same(mine, want)


def test_a_prompt_asked_again_runs_no_token(new_engine: Callable[..., Any]) -> None:
    engine = new_engine()
    ids = list(range(2, 62))
    first = engine.submit("first", ids, max_tokens=1, prompt_logprobs=5, **GREEDY)
    engine.run()
    num_run = engine.forward.num_tokens_run
    again = engine.submit("again", ids, max_tokens=1, prompt_logprobs=5, **GREEDY)
    engine.run()
    assert engine.forward.num_tokens_run == num_run == 60
    assert list(again.prompt_logprobs) == list(first.prompt_logprobs)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_prompt_one_token_longer_runs_one_token(new_engine: Callable[..., Any]) -> None:
    engine = new_engine()
    ids = list(range(2, 62))
    engine.submit("first", ids, max_tokens=1, **GREEDY)
    engine.run()
    engine.submit("longer", [*ids, 99], max_tokens=1, **GREEDY)
    engine.run()
    assert engine.forward.num_tokens_run == 61


def test_generated_tokens_are_known_to_the_next_request(new_engine: Callable[..., Any]) -> None:
    engine = new_engine()
    output = engine.submit("first", [5, 6, 7], max_tokens=8, **GREEDY)
    engine.run()
    num_run = engine.forward.num_tokens_run
    engine.submit("next", [5, 6, 7, *output.outputs[0].token_ids], max_tokens=1, **GREEDY)
    engine.run()
    assert engine.forward.num_tokens_run == num_run + 1  # the last generated token was never run


def test_a_prompt_that_preempts_the_text_it_continues_finds_the_tokens_of_that_text(
    new_engine: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    """The preempted text enters the tree between the search for the prompt's prefix and its insertion."""
    engine = new_engine(20, max_num_batched_tokens=64, max_num_seqs=8)
    text = engine.submit("text", [5, 6], max_tokens=12, **GREEDY)
    for index in range(2):
        engine.submit(f"r{index}", [20 + index], max_tokens=16, **GREEDY)
    while len(text.outputs[0].token_ids) < 4:
        engine.step()
    engine.engine.handle(Pause("text"))
    num_available = engine.scheduler.num_available
    known = [5, 6, *text.outputs[0].token_ids[:3]]
    # It fits as it starts, but the two that decode take their slots first.
    ids = [*known, *range(40, 40 + num_available - 1 - (len(known) - 2))]
    longer = engine.submit("longer", ids, max_tokens=1, prompt_logprobs=2, **GREEDY)
    engine.step()
    assert engine.scheduler.num_preempted == 1
    engine.engine.handle(Resume("text"))
    engine.run()
    alone = new_engine(400)
    want = alone.submit("alone", ids, max_tokens=1, prompt_logprobs=2, **GREEDY)
    alone.run()
    assert_same(longer, want)
    assert len(text.outputs[0].token_ids) == 12
    engine.assert_idle()


@pytest.mark.parametrize("max_num_batched_tokens", [4, 7, 64])
def test_no_step_runs_more_tokens_than_its_limit(
    new_engine: Callable[..., Any], max_num_batched_tokens: int
) -> None:
    engine = new_engine(400, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8)
    counts: list[int] = []
    engine.forward.before_run = lambda batch: counts.append(len(batch.token_ids))
    for index in range(12):
        engine.submit(f"r{index}", range(2 + index, 2 + 5 * index + 3), max_tokens=5, **GREEDY)
    engine.run()
    assert max(counts) <= max_num_batched_tokens
    engine.assert_idle()


def test_no_step_runs_more_requests_than_its_limit(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(400, max_num_seqs=3)
    for index in range(8):
        engine.submit(f"r{index}", [5, index + 2], max_tokens=6, **GREEDY)
    while engine.engine.has_work:
        engine.step()
        assert len(engine.scheduler.running) <= 3


def test_a_stream_of_short_requests_does_not_starve_a_long_one(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(90, max_num_batched_tokens=8, max_num_seqs=4)
    for index in range(4):
        engine.submit(f"early{index}", [9, index + 2], max_tokens=3, **GREEDY)
    long = engine.submit("long", range(2, 62), max_tokens=10, **GREEDY)
    for number in range(200):
        engine.submit(f"short{number}", [7, number % 200 + 2, number % 11 + 2], max_tokens=3, **GREEDY)
        engine.step()
        if long.is_finished:
            break
    assert long.is_finished, "the long request starves"
    assert number < 100
    engine.run()
    engine.assert_idle()


def test_requests_end_in_the_order_of_their_arrival_where_all_else_is_equal(
    new_engine: Callable[..., Any],
) -> None:
    engine = new_engine(60, max_num_batched_tokens=8, max_num_seqs=2)
    names = [f"r{index}" for index in range(9)]
    for index, name in enumerate(names):
        engine.submit(name, [30 + index] * 10, max_tokens=4, **GREEDY)
    ended: list[str] = []
    while engine.engine.has_work:
        engine.step()
        ended += [name for name in names if engine.num_ends[name] and name not in ended]
    assert ended == names


def test_a_preempted_request_ends_with_the_numbers_it_gets_alone(
    new_engine: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    asked = {"max_tokens": 30, "logprobs": 3, "prompt_logprobs": 2, "seed": 3, "ignore_eos": True}
    engine = new_engine(70, max_num_batched_tokens=32, max_num_seqs=4)
    prompts = [[20 + index, 30, 40 + index] * 4 for index in range(4)]
    got = [engine.submit(f"r{index}", ids, **asked) for index, ids in enumerate(prompts)]
    engine.run()
    assert engine.scheduler.num_preempted > 0, "the pool is too large for this test"
    assert [output.num_cached_tokens for output in got] == [0] * 4  # recomputation does not count
    engine.assert_idle()
    for ids, mine in zip(prompts, got, strict=True):
        alone = new_engine(70)
        want = alone.submit("alone", ids, **asked)
        alone.run()
        assert alone.scheduler.num_preempted == 0
        assert_same(mine, want)


def test_samples_of_one_prompt_run_it_once_and_differ(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(400, max_num_batched_tokens=256)
    output = engine.submit("r", range(2, 42), n=6, max_tokens=5, temperature=2.0, seed=1, ignore_eos=True)
    engine.step()
    assert engine.forward.num_tokens_run == 40
    engine.run()
    assert len({tuple(one.token_ids) for one in output.outputs}) == 6


def test_prompt_rows_come_in_steps_of_the_token_limit(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(400, max_num_batched_tokens=16)
    output = engine.submit("r", range(2, 62), max_tokens=0, prompt_logprobs=0)
    lengths = []
    while engine.engine.has_work:
        engine.step()
        lengths.append(len(output.prompt_logprobs))
    assert lengths == [17, 33, 49, 60]


def test_a_request_that_fills_the_pool_runs_alone(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(40, max_num_batched_tokens=16)
    engine.submit("small", [5, 6, 7], max_tokens=5, **GREEDY)
    whole = engine.submit("whole", range(2, 32), max_tokens=50, **GREEDY)
    engine.submit("after", [8, 6, 7], max_tokens=5, **GREEDY)
    engine.run()
    assert len(whole.outputs[0].token_ids) == 40 + 1 - 30
    assert whole.outputs[0].finish_reason == "length"
    engine.assert_idle()


def test_an_aborted_request_leaves_at_once_with_what_there_is(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(120, max_num_seqs=2)
    running = engine.submit("running", [5, 6], max_tokens=50, logprobs=0, **GREEDY)
    waiting = [engine.submit(f"r{index}", [9, 9, index + 2], max_tokens=4, **GREEDY) for index in range(3)]
    for _ in range(4):
        engine.step()
    engine.abort("running")
    engine.abort("r2")
    assert running.is_finished
    assert waiting[2].is_finished
    completion = running.outputs[0]
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == len(completion.logprobs) == 4
    engine.run()
    engine.assert_idle()
    assert [len(one.outputs[0].token_ids) for one in waiting[:2]] == [4, 4]
    engine.abort("running")  # it has ended: no effect
    engine.assert_idle()


CAPTURE = {"logits_processors": ["GlobalLogprobsCapture"]}


def test_first_tokens_of_one_call_wait_for_its_last_prompt_where_rows_are_kept(
    new_engine: Callable[..., Any],
) -> None:
    engine = new_engine(400, max_num_batched_tokens=32, **CAPTURE)
    lengths = {"short": 5, "long": 80, "scored": 50}
    calls = {"short": "one", "long": "one", "scored": "one", "other": "two", "none": "", "late": ""}
    for name, call in calls.items():
        shown = {"prompt_logprobs": 0} if name == "scored" else {}
        ids = range(2, 2 + lengths.get(name, 8))
        engine.submit(name, ids, call=call, max_tokens=3, **shown, **GREEDY)
    firsts: dict[str, int] = {}
    while engine.engine.has_work:
        engine.step()
        for name, output in engine.outputs.items():
            if output.outputs[0].token_ids:
                firsts.setdefault(name, engine.num_steps)
    assert firsts["short"] == firsts["long"] == firsts["scored"] > 3
    assert max(firsts["other"], firsts["none"], firsts["late"]) < firsts["short"]
    engine.assert_idle()


@pytest.mark.parametrize("num_slots", [45, 60, 100, 130])
@pytest.mark.parametrize("max_num_batched_tokens", [8, 64])
def test_a_call_without_room_for_all_its_prompts_ends_all_the_same(
    new_engine: Callable[..., Any], num_slots: int, max_num_batched_tokens: int
) -> None:
    texts: dict[str, list[list[int]]] = {}
    for name, more in (("gathered", CAPTURE), ("plain", {})):
        engine = new_engine(num_slots, max_num_batched_tokens=max_num_batched_tokens, **more)
        for index in range(9):
            ids = range(2 + index, 42 + index)
            call = f"call {index % 2}" if index < 6 else f"alone {index}"
            engine.submit(f"r{index}", ids, call=call, max_tokens=1 + index % 4, **GREEDY)
        engine.run()
        engine.assert_idle()
        texts[name] = [output.outputs[0].token_ids for output in engine.outputs.values()]
    assert texts["gathered"] == texts["plain"]


def test_the_rest_of_a_call_goes_on_where_one_prompt_is_given_up_or_is_paused(
    new_engine: Callable[..., Any],
) -> None:
    engine = new_engine(400, max_num_batched_tokens=16, **CAPTURE)
    for index, length in enumerate((5, 90, 100)):
        engine.submit(f"r{index}", range(2, 2 + length), call="one", max_tokens=1, **GREEDY)
    engine.step()
    assert not engine.outputs["r0"].outputs[0].token_ids
    engine.abort("r1")
    engine.engine.handle(Pause("r2", "caller"))
    engine.step()
    assert len(engine.outputs["r0"].outputs[0].token_ids) == 1
    engine.engine.handle(Resume("r2", "caller"))
    engine.run()
    engine.assert_idle()
