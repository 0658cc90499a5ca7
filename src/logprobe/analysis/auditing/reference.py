"""Exact next-token distributions ("rows") that an audit compares with a server's, computed by our engine."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from cachetools import LRUCache

from logprobe.analysis.comparison import POSITIONS_A_CALL, whole_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.measures import Floats
    from logprobe.analysis.scorer import Scorer

MAX_KEPT_BYTES: Final = 1 << 28


@final
class Reference:
    """Computes raw whole-vocabulary rows with one model, and keeps them in an LRU cache."""

    def __init__(self, llm: Scorer) -> None:
        self._llm = llm
        self._rows: LRUCache[tuple[tuple[int, ...], int], NDArray[np.float32]] = LRUCache(
            MAX_KEPT_BYTES, getsizeof=lambda rows: rows.nbytes
        )
        self.info: dict[str, Any] = {}  # facts about the model, from `LogprobsInfo`

    def rows(self, ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Return the log-probabilities that predict ids[start:], (T - start, V) nats, for `start` >= 1."""
        key = (tuple(ids), start)
        if key in self._rows:
            return self._rows[key]
        parts = [part for *_, part in whole_parts(self._llm, np.array(ids), POSITIONS_A_CALL, start)]
        info = parts[0].info
        if not self.info and info is not None:
            self.info = json.loads(json.dumps(info.to_dict()))
        rows = np.concatenate([part.rows for part in parts])
        with suppress(ValueError):  # the rows are larger than the cache
            self._rows[key] = rows
        return rows

    def chosen(self, ids: Sequence[int]) -> Floats:
        """Return the logprob of each token in ids[1:], given the tokens before it, (T - 1,) nats."""
        (score,) = self._llm.score([(list(ids[:1]), list(ids[1:]))])
        return np.array(score.token_logprobs, np.float64)
