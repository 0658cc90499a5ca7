"""Tasks, which define a data set row's (context, continuation) pairs, and output columns made of the scores.

`TextTask` scores a row's texts or choices. `AnswerTask` labels or grades a text, or ranks a document for a
query, using the plans of `analysis.labels`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np

from logprobe._arrow import pa
from logprobe.analysis import measures
from logprobe.analysis.datasets.settings import HITS, DataSettings, JudgeSettings, RerankSettings
from logprobe.analysis.labels import (
    RERANK_TEMPLATE,
    calibrated,
    classify_plan,
    judge_plan,
    rerank_plan,
)
from logprobe.analysis.scorer import prefix_of
from logprobe.analysis.windows import WindowSettings
from logprobe.errors import require
from logprobe.records.forms.versions import parquet_metadata
from logprobe.text.boundary import Split, given_bytes, split_texts
from logprobe.text.windows import last_of_split, window_pairs, window_splits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from logprobe.analysis.classification import Classification
    from logprobe.analysis.datasets.rows import Question
    from logprobe.analysis.datasets.settings import AnswerSettings, RowSettings
    from logprobe.analysis.labels import Judgement, Plan
    from logprobe.analysis.score import Score
    from logprobe.analysis.scorer import Scorer
    from logprobe.records.values import IntArray
    from logprobe.text.boundary import Pair
    from logprobe.text.spans import Spans

    LayOut: TypeAlias = Callable[[Question], Plan[list[Any]]]

Values: TypeAlias = "Callable[[list[Score]], dict[str, Any]]"
"""Maps a row's scores, one per continuation, to output values by column."""
Asked: TypeAlias = "tuple[list[list[Pair]], Values]"
"""A row's pairs and its `Values`; each continuation has a list of pairs, one pair per window."""

_TEXT, _NUMBER, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_REALS: Final = pa.list_(_REAL)
# Output columns, grouped by where their values come from: a `Score`, a `Classification` or a `Judgement`.
_SCORE: Final[dict[str, pa.DataType]] = {
    "logprob": _REAL,
    "num_tokens": _NUMBER,
    "num_bytes": _NUMBER,
    "num_chars": _NUMBER,
    "mean_logprob": _REAL,
    "logprob_per_byte": _REAL,
    "logprob_per_char": _REAL,
    "perplexity": _REAL,
    "bits_per_byte": _REAL,
    "is_greedy": _FLAG,
}
_UNCONDITIONAL: Final = {"unconditional_logprob": _REAL, "pmi": _REAL}
_TOKENS: Final = {  # column → its type, and the attribute of `Score`
    "token_ids": (pa.list_(pa.int32()), "token_ids"),
    "token_logprobs": (pa.list_(pa.float32()), "token_logprobs"),
    "token_ranks": (pa.list_(pa.int64()), "ranks"),
    "token_entropy": (pa.list_(pa.float32()), "entropy"),
}
_CHOICES: Final[dict[str, pa.DataType]] = {
    "predicted": _NUMBER,
    "predicted_by_char": _NUMBER,
    "predicted_by_byte": _NUMBER,
    "confidence": _REAL,
    "choice_logprobs": _REALS,
    "choice_num_tokens": pa.list_(_NUMBER),
    "choice_is_greedy": pa.list_(_FLAG),
    "boundary": _TEXT,
}
_ANSWER: Final[dict[str, pa.DataType]] = {
    "answer": _NUMBER,
    "answer_logprob": _REAL,
    **dict.fromkeys(HITS, _FLAG),
}
_GRADE: Final = {
    "expectation": _REAL,
    "spread": _REAL,
    "off_scale": _REAL,
    "probs": _REALS,
    "logprobs": _REALS,
    "boundary": _TEXT,
}
_LABEL: Final = {
    "predicted": _TEXT,
    "probs": _REALS,
    "logprobs": _REALS,
    "corrected": _REALS,
    "mass": _REAL,
    "margin": _REAL,
    "boundary": _TEXT,
}


class RowTask(Protocol):
    """Makes the pairs of each row and scores them."""

    def asked(self, question: Question) -> Asked:
        """Return the row's pairs and `Values`, or raise `LogprobeError` if the row cannot be scored."""

    def score(self, pairs: list[Pair]) -> list[Score]:
        """Score the pairs of one or more rows."""
        ...


def task_of(llm: Scorer, settings: RowSettings) -> RowTask:
    """Return the task for `settings`, or raise `ParameterError` if the model cannot run with them."""
    return TextTask(llm, settings) if isinstance(settings, DataSettings) else _answer_task(llm, settings)


def schema_of(settings: RowSettings) -> pa.Schema:
    """Return the schema of the output.

    Raises:
        ParameterError: a column to keep has the name of a computed column.
    """
    first = {"row": pa.int64(), "source": pa.string()}
    own = _columns_of(settings)
    check_kept(settings, first | own)
    columns = first | dict.fromkeys(settings.keep_columns, pa.string()) | own
    return pa.schema([*columns.items()], parquet_metadata("dataset"))


def check_kept(settings: RowSettings, own: Collection[str]) -> None:
    """Check that no column to keep has the name of one of the output's own columns (`own`).

    Raises:
        ParameterError: a column to keep has such a name.
    """
    for name in settings.keep_columns:
        require(name not in own, "keep_columns", f"{name!r} is an output column; rename the input column")


def _columns_of(settings: RowSettings) -> dict[str, pa.DataType]:
    """Return the type of each computed column by name.

    A list column has one value per choice, label or grade, in the order of the settings.
    """
    if isinstance(settings, RerankSettings):
        return {"relevance_score": _REAL}
    if not isinstance(settings, DataSettings):
        return _GRADE if isinstance(settings, JudgeSettings) else _LABEL
    if settings.choices_column:
        return _CHOICES | (_ANSWER if settings.answer_column else {})
    columns = _SCORE | ({"boundary": _TEXT} if settings.context_column else {})
    if settings.unconditional:
        columns |= _UNCONDITIONAL
    if settings.detect:
        columns |= dict.fromkeys(measures.DETECTIONS, _REAL) | (
            {"label": _FLAG} if settings.label_column else {}
        )
    if settings.tokens:
        columns |= {name: kind for name, (kind, _) in _TOKENS.items()}
    return columns


# -- texts and choices ---------------------------------------------------------------------------------------


class TextTask:
    """Scores the texts or choices of rows."""

    def __init__(self, llm: Scorer, settings: DataSettings) -> None:
        self._llm = llm
        self._settings = settings
        self._prefix = prefix_of(llm.text, settings.bos)
        self._max_tokens = settings.window or _most_tokens(llm)
        self._windows = WindowSettings.of(llm, window=settings.window, stride=settings.stride)

    def score(self, pairs: list[Pair]) -> list[Score]:
        """Score the pairs of some rows."""
        settings = self._settings
        return self._llm.score(
            pairs,
            entropy=settings.tokens or settings.detect,
            varentropy=settings.detect,
            unconditional=settings.unconditional,
        )

    def asked(self, question: Question) -> Asked:
        """Implement `RowTask.asked`: pair each text or choice of the question with its context."""
        parts = self._parts(question)
        values = partial(self._values, question, [data for _, data in parts])
        return [pairs for pairs, _ in parts], values

    def _parts(self, question: Question) -> list[tuple[list[Pair], bytes]]:
        """Return, for each text, its pairs and the bytes of the text that the pairs score."""
        settings, context = self._settings, question.context
        if settings.choices_column is None and context is None:
            return [self._text_pairs(text) for text in question.texts]
        delimiter = "" if settings.choices_column is None else settings.delimiter
        texts = [delimiter + text for text in question.texts]
        # Split all choices of a question together, so that all are scored by tokens, or all by bytes.
        splits = split_texts(self._llm.text, context or "", texts, rule=settings.boundary)
        return [(self._continuation_pairs(split), given_bytes(split)) for split in splits]

    def _text_pairs(self, text: str) -> tuple[list[Pair], bytes]:
        own, spans = self._llm.text.encode_with_spans(text)
        ids = np.concatenate([self._prefix, own])
        require(len(ids) > 1, "text", "has one token, which is not scored without BOS; set bos=True (--bos)")
        # Cut an array of indices instead of `ids` itself, to know which tokens of the text are scored.
        cuts = self._text_cuts(np.arange(len(ids), dtype=np.int32))
        pairs: list[Pair] = [(ids[before], ids[scored]) for before, scored in cuts]
        scored = np.concatenate([places for _, places in cuts])
        return pairs, _bytes_at(text, spans, scored - len(self._prefix))

    def _text_cuts(self, ids: IntArray) -> list[tuple[IntArray, IntArray]]:
        limit = self._max_tokens
        if len(ids) <= limit:
            return [(ids[:1], ids[1:])]
        self._check_cuts(ids)
        if self._settings.truncation == "window":
            return [*window_pairs(ids, 1, self._windows.window, self._windows.stride)]
        return [(ids[-limit:][:1], ids[-limit:][1:])]

    def _continuation_pairs(self, split: Split) -> list[Pair]:
        if len(split.token_ids) <= self._max_tokens:
            return [split.pair]
        self._check_cuts(split.token_ids)
        if self._settings.truncation != "window":
            return [last_of_split(split, self._max_tokens).pair]
        parts = window_splits(split, self._windows.window, self._windows.stride)
        # With disjoint windows, a text may skip the first token of each window, but a continuation may not,
        # because it is compared with other continuations.
        is_whole = sum(len(part.continuation) for part in parts) == len(split.continuation)
        require(
            is_whole,
            "stride",
            "must be less than the window, or some tokens of the continuation are not scored",
        )
        return [part.pair for part in parts]

    def _check_cuts(self, ids: IntArray) -> None:
        is_cut = self._settings.truncation != "error"
        remedy = f"has {len(ids)} tokens, but {self._max_tokens} fit; set truncation to 'window' or 'left'"
        require(is_cut, "text", remedy)

    def _values(self, question: Question, texts: list[bytes], scores: list[Score]) -> dict[str, Any]:
        scores = [score.counted_by(data) for score, data in zip(scores, texts, strict=True)]
        if self._settings.choices_column:
            return _choice_values(question, scores)
        return _text_values(question, scores[0], self._settings)


def _most_tokens(llm: Scorer) -> int:
    """Return the maximum number of tokens in a row: the context plus one, as the last token is never run."""
    limit: int = llm.engine.capabilities().max_model_len + 1
    return limit


def _bytes_at(text: str, spans: Spans, tokens: IntArray) -> bytes:
    """Return the UTF-8 bytes of a text that the tokens with indices `tokens` cover.

    A span that several tokens share belongs to the first of them.
    """
    data, bounds = text.encode(), np.append(0, spans[:, 1])
    return b"".join(data[bounds[token] : bounds[token + 1]] for token in tokens)


def _text_values(question: Question, score: Score, settings: DataSettings) -> dict[str, Any]:
    names = [*_SCORE, *(["boundary"] if settings.context_column else [])]
    names += [*_UNCONDITIONAL] if settings.unconditional else []
    values = {name: getattr(score, name) for name in names}
    if settings.detect:
        from logprobe.analysis.detection import Detector

        detector = Detector()
        detector.add_tokens(score.token_logprobs, score.entropy or (), score.varentropy or ())
        detector.add_text(question.texts[0])
        values |= detector.result() | ({"label": question.label} if settings.label_column else {})
    if settings.tokens:
        values |= {name: getattr(score, attribute) for name, (_, attribute) in _TOKENS.items()}
    return values


def _choice_values(question: Question, scores: Sequence[Score]) -> dict[str, Any]:
    """Return the columns of a question; a choice's numbers of characters and bytes exclude the delimiter."""
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


# -- answers to a text ---------------------------------------------------------------------------------------


class AnswerTask:
    """Scores the possible answers to each row, such as its labels or grades.

    `lay_out` makes the plan for a row, and `values` converts the plan's result to output columns.
    """

    def __init__(self, llm: Scorer, lay_out: LayOut, values: Callable[[Any], dict[str, Any]]) -> None:
        self._llm, self._lay_out, self._values = llm, lay_out, values

    def score(self, pairs: list[Pair]) -> list[Score]:
        """Score the pairs of some rows."""
        return self._llm.score(pairs)

    def asked(self, question: Question) -> Asked:
        """Implement `RowTask.asked`: pair the question's prompt with each possible answer."""
        plan = self._lay_out(question)
        sizes = [
            len(pair.token_ids) if isinstance(pair, Split) else sum(map(len, pair)) for pair in plan.pairs
        ]
        limit = _most_tokens(self._llm)
        # Reject a row that is too long here; in a batch, it would end the run.
        remedy = f"has {max(sizes)} tokens with its prompt, but {limit} fit; shorten it"
        require(max(sizes) <= limit, "text", remedy)
        return [[pair] for pair in plan.pairs], lambda scores: self._values(plan.sum_up(scores)[0])


def label_values(found: Classification) -> dict[str, Any]:
    """Return the columns of one classification."""
    return {
        "predicted": found.label,
        "probs": list(found.probabilities.values()),
        "logprobs": found.logprobs.tolist(),
        "corrected": found.corrected.tolist(),
        "mass": found.mass,
        "margin": found.margin,
        "boundary": found.boundary,
    }


def grade_values(found: Judgement) -> dict[str, Any]:
    """Return the columns of one grade."""
    return {
        "expectation": found.expectation,
        "spread": found.spread,
        "off_scale": found.off_scale,
        "probs": list(found.grades.probabilities.values()),
        "logprobs": found.grades.logprobs.tolist(),
        "boundary": found.grades.boundary,
    }


def _classification(llm: Scorer, prompt: Any, labels: Any) -> Classification:
    plan = classify_plan(llm.text, [prompt], labels)
    [found] = plan.sum_up(llm.score(plan.pairs))
    return found


def _answer_task(llm: Scorer, settings: AnswerSettings) -> AnswerTask:
    if isinstance(settings, RerankSettings):
        return AnswerTask(llm, partial(_documents, llm, settings), lambda score: {"relevance_score": score})
    if isinstance(settings, JudgeSettings):
        return AnswerTask(llm, partial(_grades, llm, settings), grade_values)
    # With `calibrated`, score the content-free text once for all rows.
    base = None if settings.empty is None else _classification(llm, settings.empty, settings.labels)

    def lay_out(question: Question) -> Plan[list[Any]]:
        correction = "none" if base is not None else settings.correction
        return classify_plan(
            llm.text, [settings.asked(question.texts[0])], settings.labels, correction=correction
        )

    def values(found: Classification) -> dict[str, Any]:
        return label_values(found if base is None else calibrated(found, base))

    return AnswerTask(llm, lay_out, values)


def _grades(llm: Scorer, settings: JudgeSettings, question: Question) -> Plan[list[Any]]:
    return judge_plan(llm.text, [settings.asked(question.texts[0])], settings.scale)


def _documents(llm: Scorer, settings: RerankSettings, question: Question) -> Plan[list[Any]]:
    return rerank_plan(
        llm.text,
        (settings.query or "") if question.context is None else question.context,
        question.texts,
        task=settings.task,
        template=settings.template or RERANK_TEMPLATE,
        labels=settings.labels,
    )
