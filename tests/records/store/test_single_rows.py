"""Rows of a step's arrays that are added one by one, each to the open block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from logprobe.errors import ParameterError
from logprobe.records import FlatLogprobs

WIDTH = 4


def some_rows(count: int, id_type: Any, rank_type: Any) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(5)
    ids = np.stack([rng.choice(500, WIDTH, replace=False) for _ in range(count)]).astype(id_type)
    logprobs = -rng.exponential(2, (count, WIDTH)).astype(np.float32)
    logprobs[:: count // 3, 0] = [0.0, -0.0, np.nan, -np.inf][: len(logprobs[:: count // 3])]
    return ids, logprobs, rng.integers(1, 500, count).astype(rank_type)


@pytest.mark.parametrize("id_type", [np.int32, np.int64, np.uint16, np.uint64, ">i4"])
@pytest.mark.parametrize("rank_type", [np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("count", [3, 2500])
def test_rows_one_by_one_are_the_rows_at_once(id_type: Any, rank_type: Any, count: int) -> None:
    ids, logprobs, ranks = some_rows(count, id_type, rank_type)
    together, singly = FlatLogprobs(), FlatLogprobs()
    together.append_rows(ids, logprobs, ranks)
    for row in range(count):
        place = slice(row, row + 1)
        singly.append_rows(ids[place], logprobs[place], ranks[place])
        assert len(singly) == row + 1
    assert singly.to_bytes() == together.to_bytes()


def test_rows_of_several_kinds_follow_one_another() -> None:
    ids, logprobs, ranks = some_rows(6, np.int32, np.int32)
    record = FlatLogprobs()
    record.append_rows(ids[:1], logprobs[:1], ranks[:1])
    record.append_rows(ids[1:2].astype(np.int64), logprobs[1:2], ranks[1:2])
    record.append_rows(ids[2:3], logprobs[2:3].astype(np.float64), ranks[2:3])
    record.append_fast(ids[3].tolist(), logprobs[3].tolist(), [7, 1, 2, 3], [None] * WIDTH)
    record.append_rows(ids[4:5], logprobs[4:5], ranks[4:5])
    assert [list(position or ()) for position in record] == ids[:5].tolist()


def test_what_is_waited_for_is_a_copy() -> None:
    ids, logprobs, ranks = some_rows(3, np.int32, np.int32)
    record, kept = FlatLogprobs(), ids[1].tolist()
    record.append_rows(ids[1:2], logprobs[1:2], ranks[1:2])
    ids[:], logprobs[:] = 9, -9
    assert list(record[0] or ()) == kept


@pytest.mark.parametrize("id_type", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("column", "value", "named"), [(0, -1, "token_ids"), (1, np.inf, "logprobs"), (2, -3, "ranks")]
)
def test_a_row_that_cannot_be_is_refused_at_once_and_adds_nothing(
    id_type: Any, column: int, value: float, named: str
) -> None:
    rows = some_rows(6, id_type, id_type)
    record = FlatLogprobs()
    record.append_rows(*(part[:1] for part in rows))
    rows[column][1].reshape(-1)[-1:] = value
    if column == 2:
        rows[2][1] = value
    with pytest.raises(ParameterError, match=named):
        record.append_rows(*(part[1:2] for part in rows))
    assert len(record) == len(list(record)) == 1
