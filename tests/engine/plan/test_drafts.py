"""Drafts by prompt lookup: the next tokens predicted from repeats, and their estimated acceptance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logprobe.engine.plan.drafts import KEY_LEN, MAX_DRAFTS, PromptLookup, least_chance

TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_text_without_repeats_gives_no_draft() -> None:
    assert PromptLookup(TEXT).draft(5, 0.0) == []
    assert PromptLookup([4]).draft(5, 0.0) == []


def test_a_repeat_goes_on_as_it_did() -> None:
    assert PromptLookup([*TEXT, 10, 3, 4, 5]).draft(3, 0.0) == [6, 7, 8]


def test_the_latest_of_several_places_counts() -> None:
    assert PromptLookup([1, 2, 3, 30, 1, 2, 3, 40, 1, 2, 3]).draft(1, 0.0) == [40]


def test_a_repeat_that_still_goes_on_repeats_its_own_drafts() -> None:
    assert PromptLookup([9, 1, 2, 3, 1, 2, 3]).draft(7, 0.0) == [1, 2, 3, 1, 2, 3, 1]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40), st.integers(0, 40))
def test_a_text_that_grows_is_the_same_as_one_that_was_there(ids: list[int], cut: int) -> None:
    whole, grown = PromptLookup(ids), PromptLookup(ids[: cut + 1])
    grown.observe(ids[cut + 1 :])
    keys = {key: after for key, after in grown._after.items() if len(key) == KEY_LEN}
    assert keys == whole._after
    assert len(grown) == len(whole) == len(ids)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=60), st.integers(1, 20))
def test_what_is_drafted_follows_the_text_s_end_somewhere_in_it(ids: list[int], most: int) -> None:
    lookup = PromptLookup(ids[:1])
    lookup.observe(ids[1:])
    drafts = lookup.draft(most, 0.0)
    assert len(drafts) <= min(most, MAX_DRAFTS)
    if drafts:
        pairs = [ids[place : place + KEY_LEN] for place in range(len(ids) - KEY_LEN)]
        assert ids[-KEY_LEN:] in pairs


def test_what_was_wrong_is_believed_less_and_what_was_right_more() -> None:
    """The same two tokens are always followed by a new one, so drafts after them soon stop."""
    lookup = PromptLookup([1, 2, 3])
    for number in range(100, 150):
        lookup.observe([1, 2, number])
    lookup.observe([1, 2])
    assert lookup.draft(5, least_chance(1)) == []
    again = PromptLookup(TEXT * 4)
    again.observe(TEXT * 20)
    assert len(again.draft(20, 0.5)) == MAX_DRAFTS


def test_a_draft_must_be_likelier_the_more_rows_a_step_has() -> None:
    chances = [least_chance(num_rows) for num_rows in (1, 2, 8, 64)]
    assert chances == sorted(chances)
    assert 0 < chances[0] < chances[-1] < 1
