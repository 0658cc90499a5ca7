from __future__ import annotations

from itertools import chain, repeat

import pytest

from logprobe.compat.vllm_logprobs import (
    FlatLogprobs,
    Logprob,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)
from logprobe.errors import ParameterError


def test_a_prompt_starts_with_one_position_that_has_no_values() -> None:
    assert create_prompt_logprobs(flat_logprobs=False) == [None]
    flat = create_prompt_logprobs(flat_logprobs=True)
    assert isinstance(flat, FlatLogprobs)
    assert len(flat) == 1
    assert flat.start_indices == [0]
    assert flat.end_indices == [0]
    assert flat.token_ids == []
    assert flat[0] is None


def test_generated_tokens_start_empty() -> None:
    assert create_sample_logprobs(flat_logprobs=False) == []
    flat = create_sample_logprobs(flat_logprobs=True)
    assert isinstance(flat, FlatLogprobs)
    assert len(flat) == 0
    assert flat.start_indices == flat.end_indices == []


@pytest.mark.parametrize("is_flat", [False, True])
def test_the_first_entry_carries_the_rank_given(is_flat: bool) -> None:
    rows = create_sample_logprobs(is_flat)
    append_logprobs_for_next_position(rows, [1], [-0.5], ["a"], rank=10, num_logprobs=-1)
    append_logprobs_for_next_position(rows, [2, 3], [-1.5, -0.25], ["b", "c"], rank=11, num_logprobs=-1)
    assert rows == [
        {1: Logprob(-0.5, 10, "a")},
        {2: Logprob(-1.5, 11, "b"), 3: Logprob(-0.25, 1, "c")},
    ]


def test_flat_columns_after_ragged_positions() -> None:
    rows = create_sample_logprobs(flat_logprobs=True)
    for ids in ([1], [2, 3], [4, 5, 6]):
        append_logprobs_for_next_position(rows, ids, [-0.1] * len(ids), ["t"] * len(ids), 11, -1)
    assert isinstance(rows, FlatLogprobs)
    assert rows.start_indices == [0, 1, 3]
    assert rows.end_indices == [1, 3, 6]
    assert rows.token_ids == [1, 2, 3, 4, 5, 6]
    assert rows.logprobs == [-0.1] * 6
    assert rows.ranks == [11, 11, 1, 11, 1, 2]
    assert rows.decoded_tokens == ["t"] * 6


@pytest.mark.parametrize("is_flat", [False, True])
def test_columns_beyond_those_asked_for_are_cut(is_flat: bool) -> None:
    rows = create_sample_logprobs(is_flat)
    append_logprobs_for_next_position(
        rows, [9, 1, 2, 3, 0, 0], [-3.0, -1.0, -1.5, -2.0, -9.0, -9.0], repeat(None), rank=7, num_logprobs=3
    )
    assert [list(position) for position in rows if position] == [[9, 1, 2, 3]]
    assert [value.rank for value in rows[0].values()] == [7, 1, 2, 3]


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_chosen_token_given_twice_reads_as_its_last_value_in_first_place(is_flat: bool) -> None:
    rows = create_sample_logprobs(is_flat)
    append_logprobs_for_next_position(rows, [7, 7, 8], [-1.0, -1.0, -1.25], repeat(None), 3, -1)
    assert rows == [{7: Logprob(-1.0, 1), 8: Logprob(-1.25, 2)}]
    assert list(rows[0]) == [7, 8]


def test_flat_columns_keep_a_chosen_token_given_twice() -> None:
    rows = create_sample_logprobs(flat_logprobs=True)
    append_logprobs_for_next_position(rows, [7, 7, 8], [-1.0, -1.0, -1.25], repeat(None), 3, -1)
    assert isinstance(rows, FlatLogprobs)
    assert rows.token_ids == [7, 7, 8]
    assert rows.ranks == [3, 1, 2]


def test_too_few_texts_add_nothing() -> None:
    rows = create_sample_logprobs(flat_logprobs=True)
    with pytest.raises(ParameterError, match=r"decoded_tokens: has 1 values for 2 token ids"):
        append_logprobs_for_next_position(rows, [1, 2], [-1.0, -2.0], ["a"], 1, -1)
    assert len(rows) == 0


def test_a_count_below_minus_one_is_refused() -> None:
    with pytest.raises(ParameterError, match="num_logprobs"):
        append_logprobs_for_next_position([], [1], [-1.0], ["a"], 1, -2)


def test_ranks_may_come_from_a_chain() -> None:
    rows = FlatLogprobs()
    rows.append_fast([5, 6], [-0.5, -1.0], chain((4,), range(1, 100)), repeat(None))
    assert rows.ranks == [4, 1]
