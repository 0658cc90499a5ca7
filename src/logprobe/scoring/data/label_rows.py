"""What rows of a data set are asked where each is a text to label, or a document for a query.

`scoring.labels` lays their pairs out and sums their scores up, row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from logprobe.errors import require
from logprobe.scoring.data.settings import LABEL_COLUMNS, RERANK_COLUMNS, LabelSettings, RerankSettings
from logprobe.scoring.labels import (
    RERANK_TEMPLATE,
    Classification,
    calibrated,
    classify,
    classify_plan,
    rerank_plan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.scoring.data.rows import Asked, Question, RowTask
    from logprobe.scoring.labels import Pair
    from logprobe.scoring.score import Score
    from logprobe.scoring.scorer import Scorer


def label_columns(settings: LabelSettings | RerankSettings) -> dict[str, pa.DataType]:
    """The columns that are computed; lists are in the order of the labels."""
    real, lists = pa.float64(), pa.list_(pa.float64())
    if isinstance(settings, RerankSettings):
        return dict.fromkeys(RERANK_COLUMNS, real)
    return dict(zip(LABEL_COLUMNS, (pa.string(), lists, lists, lists, real, real), strict=True))


def task_of(llm: Scorer, settings: LabelSettings | RerankSettings) -> RowTask:
    """What is asked of each row."""
    return RerankRows(llm, settings) if isinstance(settings, RerankSettings) else LabelRows(llm, settings)


def label_values(found: Classification) -> dict[str, Any]:
    """What a row says of one classification."""
    return {
        "predicted": found.label,
        "probs": list(found.probabilities.values()),
        "logprobs": found.logprobs.tolist(),
        "corrected": found.corrected.tolist(),
        "mass": found.mass,
        "margin": found.margin,
    }


class LabelRows:
    """Rows of texts to label; what a text without content gives is asked once for all of them."""

    def __init__(self, llm: Scorer, settings: LabelSettings) -> None:
        self._llm, self._settings = llm, settings
        self._base: Classification | None = None
        if settings.empty is not None:
            found = classify(llm, settings.empty, settings.labels)
            assert isinstance(found, Classification), "one prompt was asked"
            self._base = found

    def score(self, pairs: list[Pair]) -> list[Score]:
        """The scores of the pairs of some rows."""
        return self._llm.score(pairs)

    def asked(self, question: Question) -> Asked:
        """The labels after its text.

        Raises:
            ParameterError: it does not fit the context, or cannot be laid out.
        """
        settings, base = self._settings, self._base
        correction = settings.correction if base is None else "none"
        prompts = [settings.asked(question.texts[0])]
        plan = classify_plan(self._llm.text, prompts, settings.labels, correction=correction)
        _check_fits(self._llm, plan.pairs)

        def values(scores: list[Score]) -> dict[str, Any]:
            [found] = plan.sum_up(scores)
            return label_values(found if base is None else calibrated(found, base))

        return [[pair] for pair in plan.pairs], values


class RerankRows:
    """Rows of documents, each with its query."""

    def __init__(self, llm: Scorer, settings: RerankSettings) -> None:
        self._llm, self._settings = llm, settings

    def score(self, pairs: list[Pair]) -> list[Score]:
        """The scores of the pairs of some rows."""
        return self._llm.score(pairs)

    def asked(self, question: Question) -> Asked:
        """Both answers after the document.

        Raises:
            ParameterError: it does not fit the context, or cannot be laid out.
        """
        settings = self._settings
        plan = rerank_plan(
            self._llm.text,
            (settings.query or "") if question.context is None else question.context,
            question.texts,
            task=settings.task,
            template=settings.template or RERANK_TEMPLATE,
            labels=settings.labels,
        )
        _check_fits(self._llm, plan.pairs)
        return [[pair] for pair in plan.pairs], lambda scores: {"relevance_score": plan.sum_up(scores)[0]}


def _check_fits(llm: Scorer, pairs: Sequence[Pair]) -> None:
    """Refuse a row that is too long by itself: among others it would end the run."""
    num_tokens = max(len(before) + len(answer) for before, answer in pairs)
    limit = llm.engine.capabilities().max_model_len + 1  # the last token is never run
    require(num_tokens <= limit, "text", f"has {num_tokens} tokens as laid out, but {limit} fit; shorten it")
