"""Rows of a data set → pairs of ids → the numbers of each row.

A row is a text, a continuation after a context, or a question with choices. What is wrong with one row is
that row's own and never its neighbours'. Before it: `sources`. After it: `output`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from logprobe.errors import LogprobeError, ParameterError, require
from logprobe.scoring import measures
from logprobe.scoring.data.settings import HITS
from logprobe.scoring.score import joined
from logprobe.scoring.scorer import prefix_of
from logprobe.scoring.windows import WindowSettings, windows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from logprobe.records.values import IntArray
    from logprobe.scoring.data.settings import DataSettings
    from logprobe.scoring.data.sources import Row
    from logprobe.scoring.score import Score
    from logprobe.scoring.scorer import Scorer

Pair: TypeAlias = "tuple[IntArray, IntArray]"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def schema_of(settings: DataSettings) -> pa.Schema:
    """The columns of the output."""
    text, number, real = pa.string(), pa.int64(), pa.float64()
    columns = {"row": number, "source": text} | dict.fromkeys(settings.keep_columns, text)
    if settings.choices_column:
        columns |= {
            "predicted": number,
            "predicted_by_char": number,
            "predicted_by_byte": number,
            "confidence": real,
            "choice_logprobs": pa.list_(real),
            "choice_num_tokens": pa.list_(number),
            "choice_is_greedy": pa.list_(pa.bool_()),
        }
        if settings.answer_column:
            columns |= {"answer": number, "answer_logprob": real, "acc": pa.bool_(), "acc_norm": pa.bool_()}
            columns |= {"acc_bytes": pa.bool_()}
    else:
        columns |= {"logprob": real, "num_tokens": number, "num_bytes": number, "num_chars": number}
        columns |= {"logprob_per_token": real, "logprob_per_byte": real, "logprob_per_char": real}
        columns |= {"perplexity": real, "bits_per_byte": real, "is_greedy": pa.bool_()}
        if settings.unconditional:
            columns |= {"unconditional_logprob": real, "pmi": real}
        if settings.tokens:
            columns |= {"token_ids": pa.list_(pa.int32()), "token_logprobs": pa.list_(pa.float32())}
            columns |= {"token_ranks": pa.list_(pa.int64()), "token_entropy": pa.list_(pa.float32())}
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()])


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be scored, and why."""

    row: Row
    problem: str

    def to_dict(self) -> dict[str, Any]:
        """As a line of the side file."""
        row = self.row
        return {"row": row.index, "source": row.source, "line": row.line, "error": self.problem}


@dataclass(frozen=True, slots=True)
class Asked:
    """A row with the pairs that it asks for; a continuation in windows is several pairs."""

    row: Row
    parts: list[list[Pair]]  # one a continuation
    choices: list[str]
    answer: int | None


class RowScorer:
    """Scores rows in batches; `info` says what the numbers are, once there are any."""

    def __init__(self, llm: Scorer, settings: DataSettings) -> None:
        self._llm = llm
        self._settings = settings
        self._prefix = prefix_of(llm.text, settings.bos)
        self._limit: int = llm.engine.capabilities().max_model_len + 1  # the last token is never run
        self._windows = WindowSettings.of(llm, window=settings.window, stride=settings.stride)
        self.info: Any = None

    def score(self, rows: Sequence[Row]) -> list[dict[str, Any] | BadRow]:
        """The numbers of each row by column, or what is wrong with it.

        Raises:
            LogprobeError: the engine failed; what is wrong with a row is no reason to stop.
        """
        asked = [self._asked(row) for row in rows]
        good = [one for one in asked if isinstance(one, Asked)]
        scores = iter(self._scores([pair for one in good for part in one.parts for pair in part]))
        return [
            one
            if isinstance(one, BadRow)
            else self._values(one, [self._joined([next(scores) for _ in part]) for part in one.parts])
            for one in asked
        ]

    def _scores(self, pairs: list[Pair]) -> list[Score]:
        settings = self._settings
        scores = self._llm.score(
            pairs, lora=settings.lora, entropy=settings.tokens, unconditional=settings.unconditional
        )
        if scores and self.info is None and scores[0].record is not None:
            self.info = scores[0].record.info
        return scores

    # -- rows → pairs ----------------------------------------------------------------------------------------

    def _asked(self, row: Row) -> Asked | BadRow:
        if row.problem is not None:
            return BadRow(row, row.problem)
        try:
            return self._asked_of(row)
        except LogprobeError as error:
            return BadRow(row, " ".join(str(error).split()))

    def _asked_of(self, row: Row) -> Asked:
        settings, values = self._settings, row.values
        context = None
        if settings.context_column is not None:
            context = _text_of(values, settings.context_column, may_be_empty=True)
        if settings.choices_column is None:
            text = _text_of(values, settings.text_column)
            return Asked(row, [self._pairs(context, text)], [], None)
        choices = _choices_of(values[settings.choices_column], settings.choices_column)
        answer = None
        if settings.answer_column is not None:
            answer = _answer_of(values[settings.answer_column], choices, settings.answer_column)
        parts = [self._pairs(context or "", settings.delimiter + choice) for choice in choices]
        return Asked(row, parts, choices, answer)

    def _pairs(self, context: str | None, text: str) -> list[Pair]:
        edge = self._llm.text
        if context is None:
            ids = np.concatenate([self._prefix, edge.encode(text, add_special_tokens=False)])
            start = 1
            require(len(ids) > 1, "text", "is one token that nothing predicts; put BOS before it (--bos)")
        else:
            ids, start = edge.encode_pair(context, text)
        return list(self._cut(ids, start, has_context=context is not None))

    def _cut(self, ids: IntArray, start: int, *, has_context: bool) -> Iterator[Pair]:
        settings = self._settings
        limit = settings.window or self._limit
        if len(ids) <= limit:
            yield ids[:start], ids[start:]
        elif settings.truncation == "error":
            raise ParameterError(
                "text", f"has {len(ids)} tokens, but {limit} fit; set truncation to 'window' or 'left'"
            )
        elif settings.truncation == "left":
            fits = not has_context or len(ids) - start < limit
            require(fits, "text", f"has {len(ids) - start} tokens without its context, but {limit - 1} fit")
            first = max(start - (len(ids) - limit), 1)
            yield ids[-limit:][:first], ids[-limit:][first:]
        else:
            for window in windows([ids], self._windows.window, self._windows.stride):
                first = max(window.first_scored, start - window.start)
                if first < len(window.token_ids):
                    yield window.token_ids[:first], window.token_ids[first:]

    def _joined(self, scores: Sequence[Score]) -> Score:
        if len(scores) == 1:
            return scores[0]
        ids = [token_id for score in scores for token_id in score.token_ids]
        return joined(scores, self._llm.text.vocabulary.bytes_of(ids))

    # -- scores → values -------------------------------------------------------------------------------------

    def _values(self, asked: Asked, scores: list[Score]) -> dict[str, Any]:
        settings, row = self._settings, asked.row
        values = {"row": row.index, "source": row.source}
        values |= {name: _kept(row.values[name]) for name in settings.keep_columns}
        return values | (
            _choice_values(asked, scores) if settings.choices_column else _text_values(scores[0], settings)
        )


def _text_of(values: dict[str, Any], column: str, *, may_be_empty: bool = False) -> str:
    value = values[column]
    kind = "null" if value is None else type(value).__name__
    require(isinstance(value, str), column, f"must be a text, got {kind}")
    require(value or may_be_empty, column, "is empty; there is nothing to score")
    text: str = value
    return text


def _choices_of(value: Any, column: str) -> list[str]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ParameterError(
                column, f"must be a list of texts, as JSON where it is text: {error}"
            ) from error
    is_list = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
    require(is_list and len(value) >= 2, column, f"must be a list of at least two texts, got {value!r:.60}")
    choices: list[str] = value
    return choices


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


def _kept(value: Any) -> str | None:
    return value if isinstance(value, str) or value is None else json.dumps(value, default=str)


def _text_values(score: Score, settings: DataSettings) -> dict[str, Any]:
    names = ("logprob", "num_tokens", "num_bytes", "num_chars", "logprob_per_token", "logprob_per_byte")
    more = ("logprob_per_char", "perplexity", "bits_per_byte", "is_greedy")
    values = {name: getattr(score, name) for name in names + more}
    if settings.unconditional:
        values |= {"unconditional_logprob": score.unconditional_logprob, "pmi": score.pmi}
    if settings.tokens:
        values |= {"token_ids": score.token_ids, "token_logprobs": score.token_logprobs}
        values |= {"token_ranks": score.ranks, "token_entropy": score.entropy}
    return values


def _choice_values(asked: Asked, scores: Sequence[Score]) -> dict[str, Any]:
    """The most likely choice by sum, and by mean over its characters and bytes (without the delimiter)."""
    logprobs = np.array([score.logprob for score in scores])
    by_char = logprobs / [len(choice) for choice in asked.choices]
    by_byte = logprobs / [len(choice.encode()) for choice in asked.choices]
    best = [int(np.argmax(values)) for values in (logprobs, by_char, by_byte)]
    values = {
        "predicted": best[0],
        "predicted_by_char": best[1],
        "predicted_by_byte": best[2],
        "confidence": float(measures.choice_probabilities(logprobs).max()),
        "choice_logprobs": logprobs.tolist(),
        "choice_num_tokens": [score.num_tokens for score in scores],
        "choice_is_greedy": [score.is_greedy for score in scores],
    }
    if asked.answer is not None:
        hits = {name: one == asked.answer for name, one in zip(HITS, best, strict=True)}
        values |= {"answer": asked.answer, "answer_logprob": float(logprobs[asked.answer])} | hits
    return values


def batches(rows: Iterable[Row], settings: DataSettings) -> Iterator[list[Row]]:
    """Rows by the hundreds, fewer where they are long: what one call scores."""
    batch: list[Row] = []
    num_chars = 0
    for row in rows:
        batch.append(row)
        num_chars += sum(len(str(row.values.get(name, ""))) for name in settings.columns)
        if len(batch) >= ROWS_A_CALL or num_chars >= CHARS_A_CALL:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


ROWS_A_CALL = 256
CHARS_A_CALL = 1 << 18
