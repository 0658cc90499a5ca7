from __future__ import annotations

import pickle
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from logprobe.records import FlatLogprobs, Logprob

ROWS: list[tuple[list[int], list[str | None] | None]] = [
    ([5, 6], None),
    ([5, 7], ["five", "seven"]),
    ([5, 6], ["five", None]),
    ([6, 7], ["six", "\ufffd"]),
    ([7, 5], None),
    ([7, 5], ["seven", ""]),
]


@pytest.fixture(params=["fast", "dicts", "read between", "ragged"])
def record(request: pytest.FixtureRequest) -> FlatLogprobs:
    flat = FlatLogprobs([{}] if request.param == "ragged" else [None])
    for ids, texts in ROWS:
        if request.param == "dicts":
            triples = zip(ids, [1, 1], texts or repeat(None), strict=False)
            flat.append({token_id: Logprob(-1.0, rank, text) for token_id, rank, text in triples})
        else:
            flat.append_fast(ids, [-1.0, -1.0], [1, 1], texts or repeat(None))
        if request.param == "read between":
            assert flat.decoded_tokens[-2:] == (texts or [None, None])
    return flat


def all_texts() -> list[str | None]:
    return [text for _, texts in ROWS for text in texts or [None, None]]


def test_a_text_comes_back_with_its_own_entry_and_no_other(record: FlatLogprobs) -> None:
    assert record.decoded_tokens == all_texts()
    for (ids, texts), position in zip(ROWS, record[1:], strict=True):
        assert position is not None
        assert [position[token_id].decoded_token for token_id in ids] == (texts or [None, None])


@pytest.mark.parametrize("carry", [lambda flat: flat, lambda flat: pickle.loads(pickle.dumps(flat))])  # noqa: S301
@pytest.mark.parametrize("places", [slice(2, 5), slice(4, None), slice(None, None, -2), slice(3, 3)])
def test_a_slice_has_the_texts_of_its_entries_and_grows_apart(
    record: FlatLogprobs, carry: Any, places: slice
) -> None:
    part, whole = carry(record[places]), list(record)
    assert part == whole[places]
    part.append_fast([5, 6, 8], [-1.0] * 3, [1, 1, 2], [None, "6", "eight"])
    part.append_rows([[8, 5]], [[-1.0, -0.5]], [2])
    grown = [Logprob(-1.0, 1), Logprob(-1.0, 1, "6"), Logprob(-1.0, 2, "eight")]
    assert part == [
        *whole[places],
        dict(zip([5, 6, 8], grown, strict=True)),
        {8: Logprob(-1.0, 2), 5: Logprob(-0.5, 1)},
    ]
    assert record == whole


def test_joined_records_keep_their_texts(record: FlatLogprobs) -> None:
    joined = FlatLogprobs()
    joined.append_rows(np.int32([[7, 6]]), np.float32([[-1, -0.5]]), [2])
    joined.extend(record)
    assert joined.decoded_tokens == [None, None, *all_texts()]
    assert joined == [{7: Logprob(-1.0, 2), 6: Logprob(-0.5, 1)}, *record]
