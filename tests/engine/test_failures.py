"""A failure ends only the requests that it affects, with an error that names the cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logprobe.errors import ForwardError, NonFiniteLogitsError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

GREEDY = {"temperature": 0.0, "ignore_eos": True}
BAD_ID = 66


def fail_on_bad_id(batch: Any) -> None:
    if BAD_ID in batch.token_ids:
        raise RuntimeError("boom")


def spoil_after(engine: Any, bad_ids: set[int], value: float) -> None:
    """Make hidden rows non-finite in slots with these ids; prompts are known once they are planned."""
    bad_slots: set[int] = set()

    def watch(batch: Any) -> None:
        for token_id, slot in zip(batch.token_ids.tolist(), batch.slots.tolist(), strict=True):
            (bad_slots.add if token_id in bad_ids else bad_slots.discard)(slot)

    def spoil(slots: Any, rows: torch.Tensor) -> None:
        for place, slot in enumerate(slots.tolist()):
            if slot in bad_slots:
                rows[place] = value

    engine.forward.before_run = watch
    engine.forward.spoil = spoil


def test_a_forward_pass_that_raises_fails_its_requests_and_the_next_works(
    new_engine: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    engine = new_engine(120, max_num_seqs=2)
    engine.forward.before_run = fail_on_bad_id
    bad = engine.submit("bad", [5, 6, BAD_ID], max_tokens=3, **GREEDY)
    beside = engine.submit("beside", [5, 6, 7], max_tokens=3, **GREEDY)
    waiting = engine.submit("waiting", [5, 6, 8], max_tokens=3, logprobs=2, **GREEDY)
    engine.run()
    engine.assert_idle()
    for output in (bad, beside):
        assert isinstance(output.error, ForwardError)
        assert isinstance(output.error.__cause__, RuntimeError)
        assert "boom" in str(output.error)
        assert output.outputs[0].finish_reason == "error"
    alone = new_engine(120)
    want = alone.submit("alone", [5, 6, 8], max_tokens=3, logprobs=2, **GREEDY)
    alone.run()
    assert_same(waiting, want)


def test_what_a_failed_step_planned_is_not_taken_for_known(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(120)
    engine.forward.before_run = fail_on_bad_id
    engine.submit("bad", [5, 6, 7, BAD_ID], max_tokens=1, **GREEDY)
    engine.step()
    num_run = engine.forward.num_tokens_run
    engine.forward.before_run = lambda _: None
    output = engine.submit("again", [5, 6, 7, BAD_ID], max_tokens=1, **GREEDY)
    engine.run()
    assert engine.forward.num_tokens_run == num_run + 4
    assert output.error is None


def test_a_failure_midway_keeps_what_earlier_steps_gave(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(120)
    output = engine.submit("r", [5, 6, 7], max_tokens=9, logprobs=1, **GREEDY)
    for _ in range(3):
        engine.step()

    def fail(_: Any) -> None:
        raise RuntimeError("boom")

    engine.forward.before_run = fail
    engine.run()
    engine.assert_idle()
    assert isinstance(output.error, ForwardError)
    assert len(output.outputs[0].token_ids) == len(output.outputs[0].logprobs) == 3


def test_an_output_head_that_raises_fails_its_requests_and_the_next_works(
    new_engine: Callable[..., Any],
) -> None:
    engine = new_engine(120)

    def fail(_slots: Any, _rows: Any) -> None:
        raise MemoryError("no room")

    engine.forward.spoil = fail
    outputs = [
        engine.submit("drawn", [5, 6, 7], max_tokens=3, **GREEDY),
        engine.submit("scored", [5, 6, 8], max_tokens=0, prompt_logprobs=1),
    ]
    engine.run()
    engine.assert_idle()
    assert all("no room" in str(output.error) for output in outputs)
    engine.forward.spoil = lambda _slots, _rows: None
    output = engine.submit("next", [5, 6, 7], max_tokens=3, prompt_logprobs=1, **GREEDY)
    engine.run()
    assert output.error is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_only_the_request_that_drew_from_it(
    new_engine: Callable[..., Any], assert_same: Callable[..., None], value: float
) -> None:
    engine = new_engine(200)
    spoil_after(engine, {BAD_ID}, value)
    asked = {"max_tokens": 4, "logprobs": 2, **GREEDY}
    prompts = {"good": [5, 6, 7], "bad": [5, 6, BAD_ID], "also": [5, 6, 8]}
    outputs = {name: engine.submit(name, ids, **asked) for name, ids in prompts.items()}
    engine.run()
    engine.assert_idle()
    assert isinstance(outputs["bad"].error, NonFiniteLogitsError)
    assert "'bad'" in str(outputs["bad"].error)
    assert "position 3" in str(outputs["bad"].error)
    for name in ("good", "also"):
        alone = new_engine(200)
        want = alone.submit("alone", prompts[name], **asked)
        alone.run()
        assert_same(outputs[name], want)


def test_a_prompt_row_that_is_not_finite_fails_only_its_request_and_names_the_position(
    new_engine: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    engine = new_engine(200)
    spoil_after(engine, {BAD_ID}, float("nan"))
    asked = {"max_tokens": 2, "prompt_logprobs": 2, **GREEDY}
    good = engine.submit("good", [5, 6, 7, 8], **asked)
    bad = engine.submit("bad", [5, BAD_ID, 7, 8], **asked)
    engine.run()
    engine.assert_idle()
    assert isinstance(bad.error, NonFiniteLogitsError)
    assert "prompt position 2 of request 'bad'" in str(bad.error)
    assert bad.outputs[0].token_ids == []
    alone = new_engine(200)
    want = alone.submit("alone", [5, 6, 7, 8], **asked)
    alone.run()
    assert_same(good, want)


def test_numbers_that_are_not_finite_are_not_remembered(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(200)
    spoil_after(engine, {BAD_ID}, float("nan"))
    first = engine.submit("first", [5, BAD_ID, 7], max_tokens=0, prompt_logprobs=2)
    engine.run()
    assert first.error is not None
    engine.forward.spoil = lambda _slots, _rows: None
    again = engine.submit("again", [5, BAD_ID, 7], max_tokens=0, prompt_logprobs=2)
    engine.run()
    assert again.error is None
    assert again.prompt_logprobs.is_valid.all()


def test_one_sample_that_fails_leaves_the_others_to_end(new_engine: Callable[..., Any]) -> None:
    engine = new_engine(300)
    asked = {"n": 6, "max_tokens": 6, "temperature": 2.0, "seed": 5, "ignore_eos": True}
    want = new_engine(300)
    whole = want.submit("whole", [5, 6, 7], **asked)
    want.run()
    first_ids = [one.token_ids[0] for one in whole.outputs]
    spoil_after(engine, {first_ids[0]}, float("nan"))
    output = engine.submit("r", [5, 6, 7], **asked)
    engine.run()
    engine.assert_idle()
    for one, wanted in zip(output.outputs, whole.outputs, strict=True):
        if wanted.token_ids[0] == first_ids[0]:
            assert isinstance(one.error, NonFiniteLogitsError)
            assert one.token_ids == wanted.token_ids[:1]
    assert isinstance(output.error, NonFiniteLogitsError)
    assert output.is_finished


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_after_any_failures_every_slot_is_owned_and_every_request_ended(
    new_engine: Callable[..., Any], assert_same: Callable[..., None], data: Any
) -> None:
    engine = new_engine(
        data.draw(st.integers(45, 90)),
        max_num_batched_tokens=data.draw(st.integers(4, 40)),
        max_num_seqs=data.draw(st.integers(1, 6)),
    )
    failing_steps = data.draw(st.sets(st.integers(0, 30), min_size=1, max_size=6))
    where = data.draw(st.sampled_from(["run", "rows"]))

    def fail(*_: Any) -> None:
        if engine.num_steps in failing_steps:
            raise RuntimeError("boom")

    if where == "run":
        engine.forward.before_run = fail
    else:
        engine.forward.spoil = fail
    prompts = data.draw(
        st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=30), min_size=1, max_size=8)
    )
    asked = {"max_tokens": 8, "logprobs": 1, "prompt_logprobs": 1, "seed": 1}
    outputs = [engine.submit(f"r{index}", ids, **asked) for index, ids in enumerate(prompts)]
    engine.run()
    engine.assert_idle()
    assert all(output.is_finished for output in outputs)
    failing_steps.clear()
    again = [engine.submit(f"again{index}", ids, **asked) for index, ids in enumerate(prompts)]
    engine.run()  # with the cached prefixes
    for ids, first, second in zip(prompts, outputs, again, strict=True):
        alone = new_engine(90)
        want = alone.submit("alone", ids, **asked)
        alone.run()
        assert_same(second, want)
        if first.error is None:
            assert_same(first, want)
