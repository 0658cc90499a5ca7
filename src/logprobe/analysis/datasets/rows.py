"""Validate the rows of a data set: each row becomes a `Question` or a `BadRow`.

A row is a text, a continuation after a context, or a question with choices. Validation needs no model, and
its results can be sent to another machine to be scored. An error in one row does not affect other rows.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from logprobe.analysis.io.sources import BadRow, in_batches
from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.analysis.datasets.settings import DataSettings
    from logprobe.analysis.io.sources import Row

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
CHARS_A_CALL = 1 << 18


class Question(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A valid row; the first four fields are copied from the `Row`."""

    index: int
    source: str
    line: int
    num_bytes: float
    context: str | None  # text before `texts`, if any
    texts: list[str]  # one text, or the choices
    answer: int | None  # index of the correct choice, if known
    label: bool | None  # known class of the text, if any
    kept: dict[str, str | None]  # columns copied to the output

    @property
    def num_chars(self) -> int:
        """Number of characters in all texts of the row, including those copied to the output."""
        copied = sum(len(value or "") for value in self.kept.values())
        return sum(map(len, self.texts)) + len(self.context or "") + copied


CheckedRow: TypeAlias = Question | BadRow


def checked(row: Row, settings: DataSettings) -> CheckedRow:
    """Return the row as a `Question`, or as a `BadRow` with the error."""
    if row.problem is not None:
        return BadRow.of(row, row.problem)
    try:
        return _question_of(row, settings)
    except ParameterError as error:
        return BadRow.of(row, error)


def batches(rows: Iterable[CheckedRow]) -> Iterator[list[CheckedRow]]:
    """Yield batches of rows that one call scores: up to `ROWS_A_CALL` rows, or fewer if the rows are long."""
    return in_batches(rows, lambda row: row.num_chars if isinstance(row, Question) else 0, CHARS_A_CALL)


def _question_of(row: Row, settings: DataSettings) -> Question:
    values, context, answer, label = row.values, None, None, None
    if settings.context_column is not None:
        context = _text_of(values, settings.context_column, may_be_empty=True)
    if settings.choices_column is None:
        texts = [_text_of(values, settings.text_column)]
    else:
        texts = _choices_of(values[settings.choices_column], settings.choices_column)
    if settings.answer_column is not None:
        answer = _answer_of(values[settings.answer_column], texts, settings.answer_column)
    if settings.label_column is not None:
        label = _label_of(values[settings.label_column], settings.label_column)
    return Question(
        index=row.index,
        source=row.source,
        line=row.line,
        num_bytes=row.num_bytes,
        context=context,
        texts=texts,
        answer=answer,
        label=label,
        kept={name: _kept(values[name], name) for name in settings.keep_columns},
    )


def _text_of(values: dict[str, Any], column: str, *, may_be_empty: bool = False) -> str:
    value = values[column]
    kind = "null" if value is None else type(value).__name__
    require(isinstance(value, str), column, f"must be a string, got {kind}")
    require(value or may_be_empty, column, "is empty; there is nothing to score")
    return _encodable(value, column)


def list_in(value: Any, column: str, what: str) -> Any:
    """Return the value of a list column, parsed from JSON text if the file stores lists as text (csv).

    Raises:
        ParameterError: the text is not valid JSON; the message says that `column` must be a list of `what`.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ParameterError(column, f"must be a list of {what}, or the JSON text of one: {error}") from error


def _choices_of(value: Any, column: str) -> list[str]:
    value = list_in(value, column, "texts")
    is_list = isinstance(value, list) and all(isinstance(choice, str) and choice for choice in value)
    require(is_list and len(value) >= 2, column, "must be a list of at least two texts", got=value)
    return [_encodable(choice, column) for choice in value]


def _answer_of(value: Any, choices: list[str], column: str) -> int:
    if isinstance(value, str) and value in choices:
        return choices.index(value)
    index = value
    if isinstance(value, str):
        letter = value.strip().upper()
        index = int(value) if value.strip().isdecimal() else LETTERS.find(letter) if len(letter) == 1 else -1
    is_index = isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(choices)
    require(
        is_index,
        column,
        f"must be the text, index or letter of one of the {len(choices)} choices, got {value!r:.60}",
    )
    answer: int = index
    return answer


def _label_of(value: Any, column: str) -> bool:
    text = str(value).strip().lower()
    require(text in LABELS, column, f"must be true, false, 1 or 0, got {value!r:.60}")
    return LABELS[text]


def _kept(value: Any, column: str) -> str | None:
    if value is None:
        return None
    return _encodable(value if isinstance(value, str) else json.dumps(value, default=str), column)


def _encodable(text: str, column: str) -> str:
    """Return `text`, or raise `ParameterError` if it has an unpaired surrogate (which JSON can escape)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            column, f"has an unpaired surrogate at character {error.start}, which is not valid Unicode"
        ) from error
    return text
