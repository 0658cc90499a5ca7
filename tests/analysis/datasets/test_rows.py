"""Validated rows: the requests or the error of each, and transfer to another process."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from logprobe.analysis import DataSettings
from logprobe.analysis.datasets.rows import CHARS_A_CALL, CheckedRow, Question, batches, checked
from logprobe.analysis.io.sources import BadRow, Row

TEXT = DataSettings(keep_columns=("id",))


def row(index: int = 7, problem: str | None = None, **values: Any) -> Row:
    return Row(index=index, source="in.jsonl", line=8, num_bytes=40.0, values=values, problem=problem)


def test_a_row_keeps_its_place_and_copied_columns_become_texts() -> None:
    question = checked(row(text="the cat", id={"a": datetime(2026, 1, 2, tzinfo=UTC)}), TEXT)
    assert isinstance(question, Question)
    assert (question.index, question.source, question.line, question.num_bytes) == (7, "in.jsonl", 8, 40.0)
    assert (question.context, question.texts, question.answer) == (None, ["the cat"], None)
    assert question.kept == {"id": '{"a": "2026-01-02 00:00:00+00:00"}'}
    assert question.num_chars == len("the cat") + len(question.kept["id"] or "")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"text": b"the cat", "id": None}, "text: must be a string, got bytes"),
        ({"text": "a\ud800", "id": None}, "text: has an unpaired surrogate at character 1"),
        ({"text": "a", "id": "\udfff"}, "id: has an unpaired surrogate at character 0"),
        ({"text": "", "id": None}, "text: is empty"),
    ],
)
def test_what_is_wrong_with_a_row_names_its_column(values: dict[str, Any], says: str) -> None:
    bad = checked(row(**values), TEXT)
    assert isinstance(bad, BadRow)
    assert bad.problem.startswith(says)
    assert bad.to_dict() == {"row": 7, "source": "in.jsonl", "line": 8, "error": bad.problem}


def test_a_row_that_could_not_be_read_stays_bad() -> None:
    bad = checked(row(problem="is no\nJSON"), TEXT)
    assert isinstance(bad, BadRow)
    assert bad.problem == "is no JSON"


def test_checked_rows_cross_as_they_are() -> None:
    rows = [checked(row(text="é 🌊", id=None), TEXT), checked(row(text=5, id=1), TEXT)]
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(rows), type=list[Question | BadRow])
    assert crossed == rows


def test_long_rows_make_small_batches() -> None:
    long, short = "x" * (CHARS_A_CALL // 2), "the cat"
    rows: list[CheckedRow] = [
        checked(row(index, text=text, id=None), TEXT) for index, text in enumerate([short, long, long, short])
    ]
    assert [[one.index for one in batch] for batch in batches(rows)] == [[0, 1, 2], [3]]
