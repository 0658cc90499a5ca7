from __future__ import annotations

import json
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from logprobe.errors import ParameterError
from logprobe.records import FlatLogprobs, Logprob


class Table:
    def token_text(self, token_id: int) -> str:
        return f"t{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return b"t%d" % token_id


def test_columns_add_and_dump_like_lists() -> None:
    flat = FlatLogprobs()
    flat.append_fast([7, 8], [-0.5, -1.0], [1, 1], ["a", None])
    later, earlier = [9], [6]
    assert flat.token_ids + later == [7, 8, 9]
    assert earlier + flat.token_ids == [6, 7, 8]
    assert flat.token_ids + flat.token_ids == [7, 8, 7, 8]
    columns = [flat.token_ids, flat.logprobs, flat.ranks, flat.decoded_tokens, flat.end_indices]
    assert all(isinstance(column, list) for column in [*columns, flat.start_indices])
    assert json.dumps(columns) == '[[7, 8], [-0.5, -1.0], [1, 1], ["a", null], [2]]'


def test_a_list_that_was_read_stays_as_it_is_and_the_next_one_has_what_came() -> None:
    flat = FlatLogprobs()
    flat.append_fast([7, 8], [-0.5, -1.0], [1, 1], [None, None])
    before = flat.token_ids
    assert flat.token_ids is before
    assert flat.decoded_tokens == [None, None]
    flat.append({9: Logprob(-2.0, 1)})
    assert before == [7, 8]
    assert flat.token_ids == [7, 8, 9]
    flat.table = Table()
    assert flat.decoded_tokens == ["t7", "t8", "t9"]
    with pytest.raises(AttributeError):
        flat.token_ids = [1]


def test_arrays_are_the_lists_in_numpy() -> None:
    flat = FlatLogprobs([None, {70_000: Logprob(-0.5, None, "a"), 8: Logprob(-1.0, 3)}])
    arrays = flat.arrays
    assert arrays.offsets.tolist() == [*flat.start_indices, flat.end_indices[-1]] == [0, 0, 2]
    assert arrays.token_ids.tolist() == flat.token_ids
    assert arrays.logprobs.tolist() == flat.logprobs
    assert arrays.rank_list() == flat.ranks == [None, 3]
    assert arrays.texts == flat.decoded_tokens == ["a", None]
    assert arrays.is_none is not None
    assert arrays.is_none.tolist() == [True, False]


def test_a_record_is_made_of_its_six_columns(step: Any) -> None:
    flat = FlatLogprobs()
    flat.append_rows(*step(30, 20, 90))
    flat.append({4: Logprob(-0.1, None, "four"), 5: Logprob(-np.inf, 3)})
    flat.append_fast([1, 1, 2], [-1.0, -1.0, -2.0], [1, 1, 2], repeat("t"))
    names = ("start_indices", "end_indices", "token_ids", "logprobs", "ranks", "decoded_tokens")
    columns = {name: getattr(flat, name) for name in names}
    made = FlatLogprobs.from_columns(**columns)
    assert made == flat
    for name in names:
        assert getattr(made, name) == columns[name]
    assert FlatLogprobs.from_columns([1, 0], [2, 2], [7, 8], [-1.0, -2.0], [None, 1]) == [
        {8: Logprob(-2.0, 1)},
        {7: Logprob(-1.0), 8: Logprob(-2.0, 1)},
    ]


@pytest.mark.parametrize(
    ("columns", "parameter"),
    [
        (([0], [3], [1, 2], [-1.0, -1.0], [1, 1]), "end_indices"),
        (([1], [0], [1, 2], [-1.0, -1.0], [1, 1]), "end_indices"),
        (([0, 1], [1], [1, 2], [-1.0, -1.0], [1, 1]), "end_indices"),
        (([0], [2], [1, 2], [-1.0], [1, 1]), "logprobs"),
        (([0], [2], [1, 2.5], [-1.0, -1.0], [1, 1]), "token_ids"),
        (([0], [2], [1, 2], [-1.0, "x"], [1, 1]), "logprobs"),
        (([0], [2], [1, 2], [-1.0, -1.0], [1, -1]), "ranks"),
    ],
)
def test_columns_that_make_no_record_are_refused(columns: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as error:
        FlatLogprobs.from_columns(*columns)
    assert error.value.parameter == parameter


def test_a_position_may_be_named_as_in_other_containers() -> None:
    flat = FlatLogprobs()
    flat.append(logprobs_one_position={1: Logprob(-1.0, 1)})
    flat.append(logprobs_one_position=None)
    assert flat == [{1: Logprob(-1.0, 1)}, None]


def test_a_record_prints_as_one_short_line(step: Any) -> None:
    flat = FlatLogprobs([None])
    flat.append_rows(*step(100, 20, 90))
    assert repr(flat) == f"<FlatLogprobs: 101 positions, {flat.num_entries} entries>"


def test_chosen_tokens_stand_at_their_positions_with_a_hole_where_there_is_none() -> None:
    flat = FlatLogprobs([None, {5: Logprob(-0.5, 1)}, {}, {6: Logprob(-1.5, 2)}])
    chosen = flat.chosen_entries()
    assert chosen.logprobs.tolist() == [None, -0.5, None, -1.5]
    assert chosen.token_ids.tolist() == [None, 5, None, 6]
    assert chosen.rank_list() == [None, 1, None, 2]
    assert chosen.logprobs.sum() == -2.0
    assert np.isnan(np.asarray(chosen.logprobs)[[0, 2]]).all()
    assert type(flat[1:2].chosen_entries().logprobs) is np.ndarray
