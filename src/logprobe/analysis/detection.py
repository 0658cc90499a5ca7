"""Metrics that indicate whether a text was memorized or machine-generated, without a verdict.

The values depend on the model and on the text's language, length and kind. Compare them with the values of
texts whose origin is known (`measures.roc_auc`). The formulas are in `measures`.
"""

from __future__ import annotations

import zlib
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.analysis import measures
from logprobe.analysis.comparison import (
    POSITIONS_A_CALL,
    ROUNDING,
    common_columns,
    same_vocabulary,
    whole_parts,
    whole_scores,
)
from logprobe.analysis.scorer import prefix_of
from logprobe.errors import require
from logprobe.text.prompts import each_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.analysis.scorer import Scorer
    from logprobe.records.values import IntArray


class Detector:
    """Computes the metrics of a text that is passed in parts; keeps 24 bytes per token."""

    def __init__(self) -> None:
        self._logprobs, self._entropies, self._varentropies = array("d"), array("d"), array("d")
        self._zlib = zlib.compressobj()
        self._num_compressed = 0

    def add_tokens(
        self, logprobs: Iterable[float], entropies: Iterable[float], varentropies: Iterable[float]
    ) -> None:
        """Add scored tokens: logprob and entropy in nats, varentropy in nats squared."""
        self._logprobs.extend(logprobs)
        self._entropies.extend(entropies)
        self._varentropies.extend(varentropies)

    def add_text(self, text: str) -> None:
        """Add the next part of the text."""
        self._num_compressed += len(self._zlib.compress(text.encode()))

    def result(self) -> dict[str, float | None]:
        """Return the metrics in `measures.DETECTIONS` by name, each None if no token was scored.

        Call this once, after the last token and the last part of the text.
        """
        columns = (self._logprobs, self._entropies, self._varentropies)
        self._num_compressed += len(self._zlib.flush())
        return {
            "min_k": measures.min_k(self._logprobs),
            "min_k_plus": measures.min_k_plus(*columns),
            "fast_detect_gpt": measures.fast_detect_gpt(*columns),
            "zlib_ratio": measures.zlib_ratio(self._logprobs, self._num_compressed),
        }


def binoculars(
    observer: Scorer, performer: Scorer, texts: str | Iterable[str], *, bos: bool | None = None
) -> list[float | None]:
    """Return the Binoculars score of each text, or None for a text in which no token is scored.

    As in the authors' code, the cross-perplexity includes the next-token distribution after the last token.
    Unlike the authors' code, this function does not skip the distributions after an EOS token.

    Args:
        observer: a base model.
        performer: the observer's instruct version, with the same vocabulary.
        texts: one or more texts that fit the contexts of both models.
        bos: True puts BOS (EOS if the model has no BOS) before each text, False does not, and None does what
            the tokenizer does.

    Raises:
        ParameterError: the vocabularies differ, or a text does not fit the context of a model.
        BatchError: a request failed.
    """
    is_same = same_vocabulary(observer, performer)
    require(is_same, "performer", "must have the same vocabulary as the observer")
    prefix = prefix_of(observer.text, bos)
    ids = [
        np.concatenate([prefix, observer.text.encode(text, add_special_tokens=False)])
        for text in each_text(texts)
    ]
    return [_binoculars(observer, performer, sequence) for sequence in ids]


def _binoculars(observer: Scorer, performer: Scorer, ids: IntArray) -> float | None:
    if len(ids) < 2:
        return None
    logprobs, crossed = zip(*_rows_of_both(observer, performer, ids), strict=True)
    return measures.binoculars(np.concatenate(logprobs)[:-1], np.concatenate(crossed))


def _rows_of_both(observer: Scorer, performer: Scorer, ids: IntArray) -> Iterator[tuple[Any, Any]]:
    """Yield the performer's logprobs and the cross-entropies, one range of positions at a time.

    The last logprob belongs to a dummy token, appended to get the distribution after the text.
    """
    ids = np.append(ids, ids[-1:])
    for start, end, mine in whole_parts(observer, ids, POSITIONS_A_CALL):
        theirs = whole_scores(performer, (ids[:start], ids[start:end]))
        rows, others, missing_mass = common_columns(mine.rows, theirs.rows)
        message = "lacks tokens to which the observer gives probability; use models with the same vocabulary"
        require(bool((missing_mass <= ROUNDING).all()), "performer", message)
        yield theirs.token_logprobs, measures.cross_entropy(rows, others)
