"""From log-probabilities to answers: measures, scores, texts of any length, data sets, comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names

if TYPE_CHECKING:
    from logprobe.scoring.score import Score as Score
    from logprobe.scoring.spans import ScoredText as ScoredText
    from logprobe.scoring.spans import Unit as Unit
    from logprobe.scoring.texts import surprisal as surprisal
    from logprobe.scoring.windows import Perplexity as Perplexity
    from logprobe.scoring.windows import perplexity as perplexity

# Public name -> the module that holds it.
_HOMES = {
    "Perplexity": ".windows",
    "Score": ".score",
    "ScoredText": ".spans",
    "Unit": ".spans",
    "perplexity": ".windows",
    "surprisal": ".texts",
}

__all__ = list(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
