from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from logprobe.errors import ParameterError
from logprobe.records import Logprob, TokenLogprob, TopLogprobs


def test_a_logprob_is_a_dataclass_with_a_fixed_field_order() -> None:
    assert Logprob(-1.0) == Logprob(-1.0, None, None)
    value = Logprob(-1.0, 2, "a")
    assert value == Logprob(logprob=-1.0, rank=2, decoded_token="a")  # noqa: S106 - a piece of text
    assert Logprob(-1.0, 2) != Logprob(-1.0, 3)
    assert is_dataclass(Logprob)
    assert list(asdict(value)) == ["logprob", "rank", "decoded_token"]
    assert json.dumps(asdict(value)) == '{"logprob": -1.0, "rank": 2, "decoded_token": "a"}'
    assert replace(value, rank=3) == Logprob(-1.0, 3, "a")
    assert not hasattr(value, "__dict__")


def test_sorting_puts_the_most_likely_first() -> None:
    tokens = [TokenLogprob(1, "a", -2.0), TokenLogprob(2, "b", -0.5), TokenLogprob(3, "c", -1.0)]
    assert [token.token_id for token in sorted(tokens)] == [2, 3, 1]
    assert tokens[1] < tokens[0]


def test_the_best_come_in_order_ties_by_id() -> None:
    row = TopLogprobs.from_array(7, [-1.0, -0.5, -1.0, -3.0], [40, 30, 20, 10], ["d", "c", "b", "a"], 0, k=3)
    assert row == TopLogprobs(
        7,
        40,
        "d",
        -1.0,
        [TokenLogprob(30, "c", -0.5), TokenLogprob(20, "b", -1.0), TokenLogprob(40, "d", -1.0)],
        rank=2,
    )


@pytest.mark.parametrize(("k", "expected"), [(0, 0), (1, 1), (3, 3), (4, 3), (100, 3)])
def test_k_means_k_or_all_there_are(k: int, expected: Any) -> None:
    row = TopLogprobs.from_array(0, [-1.0, -2.0, -np.inf], [1, 2, 3], ["a", "b", "c"], 2, k)
    assert len(row.top_k) == expected
    assert row.token_id == 3
    assert row.rank == 3


@pytest.mark.parametrize("tokens", [None, [], ["a"], ["a", None]])
def test_a_missing_text_shows_the_id(tokens: Any) -> None:
    row = TopLogprobs.from_array(0, [-1.0, -2.0], [11, 12], tokens, 1)
    assert row.token == "<12>"  # noqa: S105 - a piece of text


def test_agrees_with_a_full_sort(rng: np.random.Generator) -> None:
    for _ in range(50):
        logprobs = -np.round(rng.exponential(2, 30), 1)
        ids = rng.permutation(1000)[:30]
        row = TopLogprobs.from_array(0, logprobs, ids, None, 3, k=12)
        twin = sorted(zip(-logprobs, ids, strict=True))[:12]
        assert [(-token.logprob, token.token_id) for token in row.top_k] == twin


@pytest.mark.parametrize(
    ("values", "ids", "selected", "k", "parameter"),
    [
        ([-1.0, np.nan], [1, 2], 0, 1, "logprobs"),
        ([-1.0, np.inf], [1, 2], 0, 1, "logprobs"),
        ([-1.0], [1, 2], 0, 1, "token_ids"),
        ([[-1.0]], [[1]], 0, 1, "token_ids"),
        ([-1.0], [1], 1, 1, "selected_idx"),
        ([-1.0], [1], -1, 1, "selected_idx"),
        ([-1.0], [1], 0, -1, "k"),
    ],
)
def test_a_row_that_cannot_be_ranked_is_refused(
    values: Any, ids: list[int], selected: Any, k: int, parameter: Any
) -> None:
    with pytest.raises(ParameterError) as error:
        TopLogprobs.from_array(0, values, ids, None, selected, k)
    assert error.value.parameter == parameter
