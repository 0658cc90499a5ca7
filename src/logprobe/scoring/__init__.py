"""From log-probabilities to answers: measures, scores, texts of any length, data sets, comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names

if TYPE_CHECKING:
    from logprobe.scoring.score import Score as Score

# Public name -> the module that holds it.
_HOMES = {"Score": ".score"}

__all__ = list(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
