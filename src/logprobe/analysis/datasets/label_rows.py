"""What rows of a data set are asked where each is a text to label or to grade, or a document for a query.

`analysis.labels` lays their pairs out and sums their scores up, row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from logprobe.analysis.datasets.settings import (
    GRADE_COLUMNS,
    LABEL_COLUMNS,
    RERANK_COLUMNS,
    JudgeSettings,
    LabelSettings,
    RerankSettings,
)
from logprobe.analysis.labels import (
    RERANK_TEMPLATE,
    Classification,
    calibrated,
    classify,
    classify_plan,
    judge_plan,
    rerank_plan,
)
from logprobe.errors import require
from logprobe.text.boundary import Split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.analysis.datasets.rows import Asked, Question
    from logprobe.analysis.labels import Correction, Judgement, Plan
    from logprobe.analysis.score import Score
    from logprobe.analysis.scorer import Scorer
    from logprobe.text.boundary import Pair

    AnswerSettings: TypeAlias = LabelSettings | JudgeSettings | RerankSettings
    LayOut: TypeAlias = Callable[[Question], Plan[list[Any]]]


def label_columns(settings: AnswerSettings) -> dict[str, pa.DataType]:
    """The columns that are computed; lists are in the order of the labels or of the scale."""
    real, lists = pa.float64(), pa.list_(pa.float64())
    if isinstance(settings, RerankSettings):
        return dict.fromkeys(RERANK_COLUMNS, real)
    if isinstance(settings, JudgeSettings):
        return dict(zip(GRADE_COLUMNS, (real, real, real, lists, lists, pa.string()), strict=True))
    kinds = (pa.string(), lists, lists, lists, real, real, pa.string())
    return dict(zip(LABEL_COLUMNS, kinds, strict=True))


def label_values(found: Classification) -> dict[str, Any]:
    """What a row says of one classification."""
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
    """What a row says of one grade."""
    return {
        "expectation": found.expectation,
        "spread": found.spread,
        "off_scale": found.off_scale,
        "probs": list(found.grades.probabilities.values()),
        "logprobs": found.grades.logprobs.tolist(),
        "boundary": found.grades.boundary,
    }


class AnswerRows:
    """Rows of which each asks how likely some answers to it are.

    `lay_out` makes the plan of a row, and `values` columns of what it finds.
    """

    def __init__(self, llm: Scorer, lay_out: LayOut, values: Callable[[Any], dict[str, Any]]) -> None:
        self._llm, self._lay_out, self._values = llm, lay_out, values

    def score(self, pairs: list[Pair]) -> list[Score]:
        """The scores of the pairs of some rows."""
        return self._llm.score(pairs)

    def asked(self, question: Question) -> Asked:
        """The answers after its text.

        Raises:
            ParameterError: it does not fit the context, or cannot be laid out.
        """
        plan = self._lay_out(question)
        _check_fits(self._llm, plan.pairs)
        return [[pair] for pair in plan.pairs], lambda scores: self._values(plan.sum_up(scores)[0])


def task_of(llm: Scorer, settings: AnswerSettings) -> AnswerRows:
    """What is asked of each row."""
    if isinstance(settings, RerankSettings):
        return AnswerRows(llm, _documents(llm, settings), lambda score: {"relevance_score": score})
    if isinstance(settings, JudgeSettings):
        return AnswerRows(llm, _grades(llm, settings), grade_values)
    return _label_rows(llm, settings)


def _label_rows(llm: Scorer, settings: LabelSettings) -> AnswerRows:
    """What a text without content gives is asked once for all rows."""
    if settings.empty is None:
        return AnswerRows(llm, _labels(llm, settings, settings.correction), label_values)
    base = classify(llm, settings.empty, settings.labels)
    assert isinstance(base, Classification), "one prompt was asked"
    return AnswerRows(
        llm, _labels(llm, settings, "none"), lambda found: label_values(calibrated(found, base))
    )


def _labels(llm: Scorer, settings: LabelSettings, correction: Correction) -> LayOut:
    def lay_out(question: Question) -> Plan[list[Any]]:
        prompts = [settings.asked(question.texts[0])]
        return classify_plan(llm.text, prompts, settings.labels, correction=correction)

    return lay_out


def _grades(llm: Scorer, settings: JudgeSettings) -> LayOut:
    def lay_out(question: Question) -> Plan[list[Any]]:
        return judge_plan(llm.text, [settings.asked(question.texts[0])], settings.scale)

    return lay_out


def _documents(llm: Scorer, settings: RerankSettings) -> LayOut:
    def lay_out(question: Question) -> Plan[list[Any]]:
        return rerank_plan(
            llm.text,
            (settings.query or "") if question.context is None else question.context,
            question.texts,
            task=settings.task,
            template=settings.template or RERANK_TEMPLATE,
            labels=settings.labels,
        )

    return lay_out


def _check_fits(llm: Scorer, pairs: Sequence[Pair]) -> None:
    """Refuse a row that is too long by itself: among others it would end the run."""
    num_tokens = max(
        len(pair.token_ids) if isinstance(pair, Split) else sum(map(len, pair)) for pair in pairs
    )
    limit = llm.engine.capabilities().max_model_len + 1  # the last token is never run
    require(num_tokens <= limit, "text", f"has {num_tokens} tokens as laid out, but {limit} fit; shorten it")
