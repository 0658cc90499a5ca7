"""Records as data frames, plain values and JSON: decoded texts are included, all-null columns are not."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import SamplingParams
from logprobe.errors import MissingPackageError
from logprobe.records import FlatLogprobs, Logprob, LogprobsInfo

if TYPE_CHECKING:
    from logprobe import LLM

BASE = ["position", "token_id", "token", "logprob", "rank"]


@pytest.fixture(scope="module")
def record(tiny_llm: LLM) -> FlatLogprobs:
    """The record of a prompt with alternatives, entropies and a token requested by id."""
    asked = SamplingParams(max_tokens=0, prompt_logprobs=2, entropy=True, logprob_token_ids=(5,))
    (output,) = tiny_llm.generate(["the cat and é"], asked)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def test_a_row_holds_a_position_with_its_texts(tiny_llm: LLM, record: FlatLogprobs) -> None:
    table = record.to_arrow()
    more = ["entropy", "other_logprob", "top_ids", "top_tokens", "top_logprobs", "outside_top_logprob"]
    given = ["given_ids", "given_tokens", "given_logprobs", "given_ranks"]
    assert table.column_names == [*BASE, *more, *given]
    rows = table.to_pylist()
    assert [row["position"] for row in rows] == list(range(len(record)))
    assert rows[0]["token"] is None  # the first token has no prediction
    for row, position in zip(rows[1:], record[1:], strict=True):
        assert position is not None
        entry = position[row["token_id"]]
        assert (row["token"], row["rank"]) == (entry.decoded_token, entry.rank)
        assert row["logprob"] == entry.logprob
        assert row["top_tokens"] == [position[token_id].decoded_token for token_id in row["top_ids"]]
        assert row["given_tokens"] == [tiny_llm.text.vocabulary.token_text(5)]
    assert LogprobsInfo.from_json(table.schema.metadata[b"logprobe.info"]) == record.info


def test_columns_of_nothing_are_left_out() -> None:
    bare = FlatLogprobs([None])
    bare.append_rows([[7]], [[-1.5]], [3])
    assert bare.to_arrow().column_names == [*BASE, "other_logprob"]
    assert bare.to_arrow().to_pylist()[1]["token"] is None
    assert FlatLogprobs().to_arrow().num_rows == 0


def test_texts_given_with_entries_are_kept_whatever_the_shape() -> None:
    odd = {2**40: Logprob(-0.5, None, "ü"), 3: Logprob(-math.inf, 2, ""), 4: Logprob(-2.0, 1, "x")}
    rows = FlatLogprobs([{}, odd, None]).to_arrow().to_pylist()
    assert [row["token"] for row in rows] == [None, "ü", None]
    assert rows[1]["token_id"] == 2**40


def test_pandas_keeps_whole_numbers_whole(record: FlatLogprobs) -> None:
    frame = record.to_pandas()
    assert [str(frame[name].dtype) for name in ("position", "token_id", "rank")] == ["Int64"] * 3
    assert frame["token"].tolist()[1:] == record.to_arrow()["token"].to_pylist()[1:]
    np.testing.assert_array_equal(frame["logprob"][1:], record.chosen_entries().logprobs[1:])
    assert list(frame["top_tokens"][1]) == record.to_arrow()["top_tokens"][1].as_py()


def test_polars_has_the_same_rows(record: FlatLogprobs) -> None:
    assert record.to_polars().to_dicts() == record.to_arrow().to_pylist()


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_library_that_is_missing_is_named(
    record: FlatLogprobs, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingPackageError, match=rf"{library} is not installed; pip install"):
        getattr(record, f"to_{library}")()


def test_plain_values_and_json_are_the_rows_with_what_they_are(record: FlatLogprobs) -> None:
    values = record.to_dict()
    assert record.info is not None
    assert values["info"] == record.info.to_dict()
    assert values["positions"] == record.to_arrow().to_pylist()
    read = json.loads(record.to_json())
    assert read["positions"] == values["positions"]
    assert read["floor"] == -9999.0


def test_json_has_no_infinity() -> None:
    record = FlatLogprobs([{1: Logprob(-math.inf, 2, "é")}])
    read: Any = json.loads(record.to_json(), parse_constant=pytest.fail)
    assert read["positions"][0]["logprob"] == -9999.0
    assert "é" in record.to_json()
    assert record.to_dict()["positions"][0]["logprob"] == -math.inf
