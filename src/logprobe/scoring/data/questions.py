"""Rows of a data set, checked: what each asks, or what is wrong with it; no model is needed for that.

They are plain values, so that they can be scored here or on another machine. Before it: `sources`. After it:
`rows`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.scoring.data.settings import DataSettings
    from logprobe.scoring.data.sources import Row

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ROWS_A_CALL = 256
CHARS_A_CALL = 1 << 18


class BadRow(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A row that could not be scored, and why."""

    index: int  # in the whole data set
    source: str  # the file
    line: int  # of the file, from 1
    num_bytes: float  # its share of the file, for progress
    problem: str

    def to_dict(self) -> dict[str, Any]:
        """As a line of the side file."""
        return {"row": self.index, "source": self.source, "line": self.line, "error": self.problem}


class Question(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A row whose columns hold what they should."""

    index: int
    source: str
    line: int
    num_bytes: float
    context: str | None  # what stands before the texts; None: a text alone
    texts: list[str]  # the text, or the choices
    answer: int | None  # index of the right choice, where there is one
    kept: dict[str, str | None]  # columns of the output that are copied

    @property
    def num_chars(self) -> int:
        """Characters that the model reads, and those that are copied."""
        copied = sum(len(value or "") for value in self.kept.values())
        return sum(map(len, self.texts)) + len(self.context or "") + copied


CheckedRow: TypeAlias = Question | BadRow


def checked(row: Row, settings: DataSettings) -> CheckedRow:
    """What a row asks, or what is wrong with it."""
    if row.problem is not None:
        return bad_row(row, row.problem)
    try:
        return _question_of(row, settings)
    except ParameterError as error:
        return bad_row(row, str(error))


def bad_row(row: Row | Question, problem: str) -> BadRow:
    """A row with what is wrong with it, in one line."""
    return BadRow(
        index=row.index,
        source=row.source,
        line=row.line,
        num_bytes=row.num_bytes,
        problem=" ".join(problem.split()),
    )


def batches(rows: Iterable[CheckedRow]) -> Iterator[list[CheckedRow]]:
    """Rows by the hundreds, fewer where they are long: what one call scores."""
    batch: list[CheckedRow] = []
    num_chars = 0
    for row in rows:
        batch.append(row)
        num_chars += row.num_chars if isinstance(row, Question) else 0
        if len(batch) >= ROWS_A_CALL or num_chars >= CHARS_A_CALL:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _question_of(row: Row, settings: DataSettings) -> Question:
    values, context, answer = row.values, None, None
    if settings.context_column is not None:
        context = _text_of(values, settings.context_column, may_be_empty=True)
    if settings.choices_column is None:
        texts = [_text_of(values, settings.text_column)]
    else:
        texts = _choices_of(values[settings.choices_column], settings.choices_column)
    if settings.answer_column is not None:
        answer = _answer_of(values[settings.answer_column], texts, settings.answer_column)
    return Question(
        index=row.index,
        source=row.source,
        line=row.line,
        num_bytes=row.num_bytes,
        context=context,
        texts=texts,
        answer=answer,
        kept={name: _kept(values[name], name) for name in settings.keep_columns},
    )


def _text_of(values: dict[str, Any], column: str, *, may_be_empty: bool = False) -> str:
    value = values[column]
    kind = "null" if value is None else type(value).__name__
    require(isinstance(value, str), column, f"must be a text, got {kind}")
    require(value or may_be_empty, column, "is empty; there is nothing to score")
    return _encodable(value, column)


def _choices_of(value: Any, column: str) -> list[str]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ParameterError(
                column, f"must be a list of texts, as JSON where it is text: {error}"
            ) from error
    is_list = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
    require(is_list and len(value) >= 2, column, "must be a list of at least two texts", got=value)
    return [_encodable(choice, column) for choice in value]


def _answer_of(value: Any, choices: list[str], column: str) -> int:
    if isinstance(value, str) and value in choices:
        return choices.index(value)
    place = value
    if isinstance(value, str):
        letter = value.strip().upper()
        place = int(value) if value.strip().isdecimal() else LETTERS.find(letter) if len(letter) == 1 else -1
    is_place = isinstance(place, int) and not isinstance(place, bool) and 0 <= place < len(choices)
    require(is_place, column, f"names none of the {len(choices)} choices: {value!r:.60}")
    answer: int = place
    return answer


def _kept(value: Any, column: str) -> str | None:
    if value is None:
        return None
    return _encodable(value if isinstance(value, str) else json.dumps(value, default=str), column)


def _encodable(text: str, column: str) -> str:
    """The same text; JSON can name half a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            column, f"holds half a surrogate pair at character {error.start}, which is no Unicode text"
        ) from error
    return text
