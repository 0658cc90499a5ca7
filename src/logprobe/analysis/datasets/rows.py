"""Rows of a data set: what each asks, or what is wrong with it, and the numbers that it gets.

A row is a text, a continuation after a context, or a question with choices. It is checked without a model,
into plain values, so that it can be scored here or on another machine. What is wrong with one row is that
row's own and never its neighbours'.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from logprobe.analysis import measures
from logprobe.analysis.datasets.label_rows import label_columns, task_of
from logprobe.analysis.datasets.settings import HITS, DataSettings
from logprobe.analysis.score import joined
from logprobe.analysis.scorer import prefix_of
from logprobe.analysis.windows import WindowSettings
from logprobe.errors import LogprobeError, ParameterError, require
from logprobe.records.info import LogprobsInfo  # noqa: TC001 - msgspec reads the fields
from logprobe.text.boundary import given_bytes, split_texts
from logprobe.text.windows import last_of_split, window_pairs, window_splits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from logprobe.analysis.datasets.settings import RowSettings
    from logprobe.analysis.datasets.sources import Row
    from logprobe.analysis.score import Score
    from logprobe.analysis.scorer import Scorer
    from logprobe.records.values import IntArray
    from logprobe.text.boundary import Pair, Split
    from logprobe.text.spans import Spans

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
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
    label: bool | None  # what is known of the text, where it is
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
    require(is_index, column, f"names none of the {len(choices)} choices: {value!r:.60}")
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
    """The same text; JSON can name half a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            column, f"holds half a surrogate pair at character {error.start}, which is no Unicode text"
        ) from error
    return text


# -- questions → pairs of ids → numbers ----------------------------------------------------------------------

Values: TypeAlias = "Callable[[list[Score]], dict[str, Any]]"
"""What a row's scores, one a continuation, come to, by column."""
Asked: TypeAlias = "tuple[list[list[Pair]], Values]"
"""The pairs that a row asks for, a list for each continuation; one in windows is several pairs."""


class RowTask(Protocol):
    """What is asked of each row."""

    def asked(self, question: Question) -> Asked:
        """Its pairs; `LogprobeError` where it cannot be scored."""

    def score(self, pairs: list[Pair]) -> list[Score]:
        """The scores of the pairs of some rows."""
        ...


def schema_of(settings: RowSettings) -> pa.Schema:
    """The columns of the output.

    Raises:
        ParameterError: a column to keep is named as one of them.
    """
    own = _columns_of(settings) if isinstance(settings, DataSettings) else label_columns(settings)
    first = {"row": pa.int64(), "source": pa.string()}
    check_kept(settings, first | own)
    columns = first | dict.fromkeys(settings.keep_columns, pa.string()) | own
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()])


def check_kept(settings: RowSettings, own: Collection[str]) -> None:
    """Refuse to copy a column under the name of one of the output's own.

    Raises:
        ParameterError: there is one.
    """
    for name in settings.keep_columns:
        require(name not in own, "keep_columns", f"{name!r} is a column of the output; rename the file's")


def _columns_of(settings: DataSettings) -> dict[str, pa.DataType]:
    number, real = pa.int64(), pa.float64()
    columns: dict[str, pa.DataType] = {}
    if settings.choices_column:
        columns |= {
            "predicted": number,
            "predicted_by_char": number,
            "predicted_by_byte": number,
            "confidence": real,
            "choice_logprobs": pa.list_(real),
            "choice_num_tokens": pa.list_(number),
            "choice_is_greedy": pa.list_(pa.bool_()),
            "boundary": pa.string(),
        }
        if settings.answer_column:
            columns |= {"answer": number, "answer_logprob": real, "acc": pa.bool_(), "acc_norm": pa.bool_()}
            columns |= {"acc_bytes": pa.bool_()}
    else:
        columns |= {"logprob": real, "num_tokens": number, "num_bytes": number, "num_chars": number}
        columns |= {"logprob_per_token": real, "logprob_per_byte": real, "logprob_per_char": real}
        columns |= {"perplexity": real, "bits_per_byte": real, "is_greedy": pa.bool_()}
        columns |= {"boundary": pa.string()} if settings.context_column else {}
        if settings.unconditional:
            columns |= {"unconditional_logprob": real, "pmi": real}
        if settings.detect:
            columns |= dict.fromkeys(measures.DETECTIONS, real)
            columns |= {"label": pa.bool_()} if settings.label_column else {}
        if settings.tokens:
            columns |= {"token_ids": pa.list_(pa.int32()), "token_logprobs": pa.list_(pa.float32())}
            columns |= {"token_ranks": pa.list_(pa.int64()), "token_entropy": pa.list_(pa.float32())}
    return columns


class ScoredBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a batch of rows came to, and what its numbers are."""

    end: int  # one past the index of its last row
    num_bytes: float  # of the files, for progress
    rows: list[dict[str, Any]]  # by column, in order
    bad: list[BadRow]  # in order
    source: dict[str, str | None]  # the model and its weights, as `Workers.source_of_numbers`
    info: LogprobsInfo | None  # None where there are no numbers

    @property
    def num_rows(self) -> int:
        """Rows answered, the bad ones too."""
        return len(self.rows) + len(self.bad)


def source_of_numbers(llm: Scorer) -> dict[str, str | None]:
    """A model and its weights, as they are now."""
    facts = llm.engine.capabilities()
    return {
        "model": facts.model,
        "weights": f"{facts.dtype} {facts.weights}",
        "weight_version": facts.weight_version,
        "lora": llm.lora,
    }


class RowScorer:
    """Scores rows in batches, each on its own.

    Raises:
        ParameterError: settings that this model cannot follow.
    """

    def __init__(self, llm: Scorer, settings: RowSettings) -> None:
        self._llm = llm
        self._task: RowTask = (
            TextRows(llm, settings) if isinstance(settings, DataSettings) else task_of(llm, settings)
        )

    def source_of_numbers(self) -> dict[str, str | None]:
        """The model and its weights, as they are now."""
        return source_of_numbers(self._llm)

    def score(self, batch: Sequence[CheckedRow]) -> ScoredBatch:
        """The numbers of each row, or what is wrong with it.

        Raises:
            LogprobeError: the engine failed; what is wrong with a row is no reason to stop.
        """
        asked = [self._asked(row) for row in batch]
        good = [row for row in asked if not isinstance(row, BadRow)]
        scores = self._task.score([pair for _, (parts, _) in good for part in parts for pair in part])
        info = next((score.record.info for score in scores if score.record is not None), None)
        source, remaining = self.source_of_numbers(), iter(scores)
        if info is not None:
            # Others may have taken over since.
            source |= {"weight_version": info.weight_version, "lora_version": info.lora_version}
        return ScoredBatch(
            end=batch[-1].index + 1,
            num_bytes=sum(row.num_bytes for row in batch),
            rows=[
                {"row": question.index, "source": question.source, **question.kept}
                | values([_as_one([next(remaining) for _ in part]) for part in parts])
                for question, (parts, values) in good
            ],
            bad=[row for row in asked if isinstance(row, BadRow)],
            source=source,
            info=info,
        )

    def _asked(self, row: CheckedRow) -> tuple[Question, Asked] | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            return row, self._task.asked(row)
        except LogprobeError as error:
            return bad_row(row, str(error))


def _as_one(scores: Sequence[Score]) -> Score:
    """Join the scores of the windows of a text; the task counts its bytes (`Score.counted_by`)."""
    return scores[0] if len(scores) == 1 else joined(scores, b"")


class TextRows:
    """Rows whose texts or choices are scored.

    Raises:
        ParameterError: settings that this model cannot follow.
    """

    def __init__(self, llm: Scorer, settings: DataSettings) -> None:
        self._llm = llm
        self._settings = settings
        self._prefix = prefix_of(llm.text, settings.bos)
        facts = llm.engine.capabilities()
        self._limit: int = facts.max_model_len + 1  # the last token is never run
        self._windows = WindowSettings.of(llm, window=settings.window, stride=settings.stride)

    def score(self, pairs: list[Pair]) -> list[Score]:
        """The scores of the pairs of some rows."""
        settings = self._settings
        return self._llm.score(
            pairs,
            entropy=settings.tokens or settings.detect,
            varentropy=settings.detect,
            unconditional=settings.unconditional,
        )

    def asked(self, question: Question) -> Asked:
        """The pairs of its texts, and what their scores come to.

        Raises:
            LogprobeError: it cannot be scored.
        """
        parts = self._parts(question)
        values = partial(self._values, question, [data for _, data in parts])
        return [pairs for pairs, _ in parts], values

    def _parts(self, question: Question) -> list[tuple[list[Pair], bytes]]:
        """The pairs of each text, and the bytes of it that they score."""
        settings, context = self._settings, question.context
        if settings.choices_column is None and context is None:
            return [self._text_pairs(text) for text in question.texts]
        delimiter = "" if settings.choices_column is None else settings.delimiter
        texts = [delimiter + text for text in question.texts]
        # The choices of a question are all measured in the same way.
        splits = split_texts(self._llm.text, context or "", texts, rule=settings.boundary)
        return [(self._continuation_pairs(split), given_bytes(split)) for split in splits]

    def _text_pairs(self, text: str) -> tuple[list[Pair], bytes]:
        own, spans = self._llm.text.encode_with_spans(text)
        ids = np.concatenate([self._prefix, own])
        require(len(ids) > 1, "text", "is one token that nothing predicts; put BOS before it (--bos)")
        # Of places in `ids`, so that it is known which tokens of the text have a number.
        cuts = self._text_cuts(np.arange(len(ids), dtype=np.int32))
        pairs: list[Pair] = [(ids[before], ids[scored]) for before, scored in cuts]
        scored = np.concatenate([places for _, places in cuts])
        return pairs, _bytes_at(text, spans, scored - len(self._prefix))

    def _text_cuts(self, ids: IntArray) -> list[tuple[IntArray, IntArray]]:
        settings, limit = self._settings, self._max_tokens
        if len(ids) <= limit:
            return [(ids[:1], ids[1:])]
        self._check_cuts(ids)
        if settings.truncation == "window":
            return [*window_pairs(ids, 1, self._windows.window, self._windows.stride)]
        return [(ids[-limit:][:1], ids[-limit:][1:])]

    def _continuation_pairs(self, split: Split) -> list[Pair]:
        if len(split.token_ids) <= self._max_tokens:
            return [split.pair]
        self._check_cuts(split.token_ids)
        if self._settings.truncation != "window":
            return [last_of_split(split, self._max_tokens).pair]
        parts = window_splits(split, self._windows.window, self._windows.stride)
        # A text may lose the first token of each disjoint window; a continuation is compared with others.
        is_whole = sum(len(part.continuation) for part in parts) == len(split.continuation)
        require(is_whole, "stride", "leaves tokens of it without a number; give less than a window")
        return [part.pair for part in parts]

    @property
    def _max_tokens(self) -> int:
        return self._settings.window or self._limit

    def _check_cuts(self, ids: IntArray) -> None:
        is_cut = self._settings.truncation != "error"
        remedy = f"has {len(ids)} tokens, but {self._max_tokens} fit; set truncation to 'window' or 'left'"
        require(is_cut, "text", remedy)

    def _values(self, question: Question, texts: list[bytes], scores: list[Score]) -> dict[str, Any]:
        scores = [score.counted_by(data) for score, data in zip(scores, texts, strict=True)]
        if self._settings.choices_column:
            return _choice_values(question, scores)
        return _text_values(question, scores[0], self._settings)


def _bytes_at(text: str, spans: Spans, tokens: IntArray) -> bytes:
    """The UTF-8 of the parts of a text that some tokens come from; a shared span is the first one's."""
    data, bounds = text.encode(), np.append(0, spans[:, 1])
    return b"".join(data[bounds[token] : bounds[token + 1]] for token in tokens)


def _text_values(question: Question, score: Score, settings: DataSettings) -> dict[str, Any]:
    names = ("logprob", "num_tokens", "num_bytes", "num_chars", "logprob_per_token", "logprob_per_byte")
    more = ("logprob_per_char", "perplexity", "bits_per_byte", "is_greedy")
    values = {name: getattr(score, name) for name in names + more}
    if settings.context_column:
        values["boundary"] = score.boundary
    if settings.unconditional:
        values |= {"unconditional_logprob": score.unconditional_logprob, "pmi": score.pmi}
    if settings.detect:
        from logprobe.analysis.detection import Detector

        detector = Detector()
        detector.add_tokens(score.token_logprobs, score.entropy or (), score.varentropy or ())
        detector.add_text(question.texts[0])
        values |= detector.result() | ({"label": question.label} if settings.label_column else {})
    if settings.tokens:
        values |= {"token_ids": score.token_ids, "token_logprobs": score.token_logprobs}
        values |= {"token_ranks": score.ranks, "token_entropy": score.entropy}
    return values


def _choice_values(question: Question, scores: Sequence[Score]) -> dict[str, Any]:
    """The most likely choice by sum, and by mean over its characters and bytes (without the delimiter)."""
    logprobs = np.array([score.logprob for score in scores])
    by_char = logprobs / [len(choice) for choice in question.texts]
    by_byte = logprobs / [len(choice.encode()) for choice in question.texts]
    best = [int(np.argmax(values)) for values in (logprobs, by_char, by_byte)]
    values = {
        "predicted": best[0],
        "predicted_by_char": best[1],
        "predicted_by_byte": best[2],
        "confidence": float(measures.choice_probabilities(logprobs).max()),
        "choice_logprobs": logprobs.tolist(),
        "choice_num_tokens": [score.num_tokens for score in scores],
        "choice_is_greedy": [score.is_greedy for score in scores],
        "boundary": scores[0].boundary,
    }
    if question.answer is not None:
        hits = {name: choice == question.answer for name, choice in zip(HITS, best, strict=True)}
        values |= {"answer": question.answer, "answer_logprob": float(logprobs[question.answer])} | hits
    return values
