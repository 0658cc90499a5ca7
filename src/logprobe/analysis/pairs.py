"""Minimal pairs: how often a model gives the good text of a pair the higher log-probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.analysis.statistics import Mean
from logprobe.analysis.texts import surprisal
from logprobe.errors import ParameterError, require
from logprobe.records.values import EqualByValue
from logprobe.text.prompts import as_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from logprobe.analysis.scorer import Scorer

PAIRS_A_CALL = 512  # pairs whose tokens are held at once


@dataclass(frozen=True, kw_only=True, eq=False)
class MinimalPairs(EqualByValue):
    """Results for minimal pairs; a pair is right if the good text has a higher logprob than the bad text."""

    accuracy: Mean  # share of pairs that are right, with the standard error
    by_category: dict[str, Mean]  # accuracy per category, in order of first appearance
    good_logprobs: NDArray[np.float64] = field(repr=False)  # (N,) nats, sums over the tokens
    bad_logprobs: NDArray[np.float64] = field(repr=False)  # (N,) nats
    is_right: NDArray[np.bool_] = field(repr=False)  # (N,); equal logprobs are wrong
    categories: list[str] = field(repr=False)  # (N,), or empty

    def __str__(self) -> str:
        rows = {**self.by_category, "all": self.accuracy}
        width = max(len(str(name)) for name in rows)
        return "\n".join(f"{name!s:{width}}  {share}" for name, share in rows.items())

    def to_pandas(self) -> Any:
        """Return a pandas data frame with one row per pair; requires the extra `frames`.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        from logprobe.records.forms.frames import frame_of

        columns = {
            "good_logprob": self.good_logprobs,
            "bad_logprob": self.bad_logprobs,
            "is_right": self.is_right,
            **({"category": self.categories} if self.categories else {}),
        }
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return frame_of(rows, list(columns), floats=("good_logprob", "bad_logprob"))


def minimal_pairs(
    llm: Scorer,
    pairs: Iterable[tuple[str, str]],
    categories: Sequence[str] | None = None,
    *,
    bos: bool | None = True,
) -> MinimalPairs:
    """Score pairs of a good and a bad text and compute the accuracy; see `LLM.minimal_pairs`."""
    known = "must be an iterable of (good, bad) pairs of texts"
    pairs = as_list(pairs, "pairs", known)
    require(pairs, "pairs", "must not be empty")
    for number, pair in enumerate(pairs):
        is_pair = isinstance(pair, Sequence | np.ndarray) and not isinstance(pair, str) and len(pair) == 2
        if not (is_pair and all(isinstance(text, str) for text in pair)):
            raise ParameterError("pairs", f"{known}, but item {number} is {pair!r:.60}")
    names = list(categories or ())
    fits = categories is None or len(names) == len(pairs)
    require(fits, "categories", f"must have one name per pair, got {len(names)} for {len(pairs)}")
    good, bad = np.fromiter(_logprobs(llm, pairs, bos), np.dtype((np.float64, 2)), len(pairs)).T
    is_right = good > bad
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return MinimalPairs(
        accuracy=Mean.of(is_right),
        by_category={name: Mean.of(is_right[own]) for name, own in places.items()},
        good_logprobs=good,
        bad_logprobs=bad,
        is_right=is_right,
        categories=names,
    )


def _logprobs(
    llm: Scorer, pairs: Sequence[tuple[str, str]], bos: bool | None
) -> Iterator[tuple[float, float]]:
    """Yield the logprobs of both texts of each pair, `PAIRS_A_CALL` pairs per call."""
    for first in range(0, len(pairs), PAIRS_A_CALL):
        texts = [text for pair in pairs[first : first + PAIRS_A_CALL] for text in pair]
        try:
            scored = surprisal(llm, texts, bos=bos)
        except ParameterError as error:
            if error.parameter != "texts":
                raise
            where = f"among the texts from pair {first} on, "
            raise ParameterError("pairs", where + str(error).removeprefix("texts: ")) from error
        for number, text in enumerate(scored):
            what = f"pair {first + number // 2} has a text without scored tokens, {text.text!r:.60}"
            require(not np.isnan(text.logprobs).all(), "pairs", f"{what}; use bos=True (--bos)")
        yield from zip(*([text.logprob for text in scored[side::2]] for side in (0, 1)), strict=True)
