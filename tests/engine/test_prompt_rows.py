"""Rows of cached prompts answer later requests without the model and head if they have all that is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logprobe.transport.messages import ForgetPrefixes

if TYPE_CHECKING:
    from collections.abc import Callable

IDS = list(range(2, 32))


@pytest.fixture
def engine(new_engine: Callable[..., Any]) -> Any:
    made = new_engine(300)
    made.num_head_rows = 0

    def count(slots: Any, _rows: Any) -> None:
        made.num_head_rows += len(slots)

    made.forward.spoil = count
    return made


def score(engine: Any, name: str, ids: list[int] = IDS, **params: Any) -> Any:
    output = engine.submit(name, ids, max_tokens=0, **params)
    engine.run()
    return output


@pytest.mark.parametrize(
    ("first", "second", "is_known"),
    [
        ({"prompt_logprobs": 5}, {"prompt_logprobs": 5}, True),
        ({"prompt_logprobs": 20}, {"prompt_logprobs": 3}, True),
        ({"prompt_logprobs": -1}, {"prompt_logprobs": 20}, True),
        ({"prompt_logprobs": 3}, {"prompt_logprobs": 4}, False),
        ({"prompt_logprobs": 30}, {"prompt_logprobs": 30}, False),  # more alternatives than are cached
        ({"prompt_logprobs": 0}, {"prompt_logprobs": 0, "entropy": True}, False),
        ({"prompt_logprobs": 0, "entropy": True}, {"prompt_logprobs": 0, "entropy": True}, True),
        ({"prompt_logprobs": 0, "entropy": True}, {"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": 0, "logprob_token_ids": [7]}, False),
    ],
)
def test_a_prompt_asked_again_costs_the_head_only_where_more_is_asked(
    engine: Any, first: dict[str, Any], second: dict[str, Any], is_known: bool
) -> None:
    score(engine, "first", **first)
    assert engine.num_head_rows == len(IDS) - 1
    output = score(engine, "second", **second)
    assert engine.num_head_rows == (1 if is_known else 2) * (len(IDS) - 1)
    assert engine.forward.num_tokens_run == len(IDS) - 1
    rows = output.prompt_logprobs
    assert (rows.entropy is not None) == second.get("entropy", False)
    assert (rows.given is not None) == ("logprob_token_ids" in second)


def test_another_next_token_is_another_question(
    engine: Any, new_engine: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    score(engine, "first", prompt_logprobs=2)
    other = [*IDS[:-1], 200]
    got = score(engine, "other", other, prompt_logprobs=2)
    assert engine.forward.num_tokens_run == len(IDS) - 1
    cold = new_engine(300)
    assert_same(got, score(cold, "alone", other, prompt_logprobs=2))


def test_a_slot_used_anew_is_not_answered_from_its_past(
    new_engine: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    engine = new_engine(40)
    prompts = [[(index * 7 + place) % 3 + 2 for place in range(35)] for index in range(6)]
    got = [score(engine, f"r{index}", ids, prompt_logprobs=1) for index, ids in enumerate(prompts)]
    for ids, output in zip(prompts, got, strict=True):
        assert_same(output, score(new_engine(40), "alone", ids, prompt_logprobs=1))


@pytest.mark.parametrize("num_slots", [40, 300])
def test_texts_that_differ_in_their_first_token_alone_share_no_row_of_a_slot_used_anew(
    new_engine: Callable[..., Any], assert_same: Callable[..., None], num_slots: int
) -> None:
    # The same next token follows the same slot, but after a different text.
    engine = new_engine(num_slots)
    texts = [[first, *IDS] for first in (40, 50, 60)]
    got = []
    for first, ids in enumerate(texts):
        got.append(score(engine, f"r{first}", ids, prompt_logprobs=1))
        if num_slots > sum(map(len, texts)):  # otherwise they are evicted
            engine.take(engine.engine.handle(ForgetPrefixes()))
    for ids, output in zip(texts, got, strict=True):
        assert_same(output, score(new_engine(num_slots), "alone", ids, prompt_logprobs=1))
