"""Reference rows, computed by our engine, and the distributions that request parameters turn them into."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from logprobe.analysis.auditing.distributions import Shaping, distributions, tempered
from logprobe.analysis.score import whole_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.measures import Floats
    from logprobe.analysis.scorer import Scorer

MAX_KEPT_BYTES: Final = 1 << 28
POSITIONS_A_CALL: Final = 128
SHAPES: Final = ("temperature", "top_k", "top_p", "min_p")


@final
class Reference:
    """Full raw rows of one model, nats, with an LRU cache."""

    def __init__(self, llm: Scorer) -> None:
        self._llm = llm
        self._rows: OrderedDict[tuple[tuple[int, ...], int], NDArray[np.float32]] = OrderedDict()
        self._kept_bytes = 0
        self.info: dict[str, Any] = {}

    def rows(self, ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Return the distributions that predict ids[start:], (T - start, V) nats; `start` is at least 1."""
        key = (tuple(ids), start)
        if key in self._rows:
            self._rows.move_to_end(key)
            return self._rows[key]
        parts = []
        for first in range(start, len(ids), POSITIONS_A_CALL):
            stop = min(first + POSITIONS_A_CALL, len(ids))
            (score,) = self._llm.score([(list(ids[:first]), list(ids[first:stop]))], logprobs=-1)
            assert score.record is not None
            parts.append(whole_rows(score.record))
            if not self.info and score.record.info is not None:
                self.info = json.loads(json.dumps(score.record.info.to_dict()))
        rows = np.concatenate(parts)
        self._keep(key, rows)
        return rows

    def _keep(self, key: tuple[tuple[int, ...], int], rows: NDArray[np.float32]) -> None:
        self._rows[key] = rows
        self._kept_bytes += rows.nbytes
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._rows) > 1:
            self._kept_bytes -= self._rows.popitem(last=False)[1].nbytes

    def chosen(self, ids: Sequence[int]) -> Floats:
        """Return the logprobs of ids[1:], (T - 1,) nats."""
        (score,) = self._llm.score([(list(ids[:1]), list(ids[1:]))])
        return np.array(score.token_logprobs, np.float64)


def shaping_of(params: Mapping[str, Any]) -> Shaping:
    """Return the shaping that a request's parameters apply after penalties and masks."""
    return Shaping(**{name: params[name] for name in SHAPES if name in params})


def changed_logits(
    rows: NDArray[np.float32], params: Mapping[str, Any], completion: Sequence[int]
) -> dict[str, Floats]:
    """Return rows (T, V) after a bias or penalties, by distribution name; row t follows completion[:t].

    Repetition penalties are not covered: they divide logits, which log-probabilities do not determine.
    """
    bias = params.get("logit_bias")
    logits = rows.astype(np.float64)
    found: dict[str, Floats] = {}
    if bias:
        for key, value in bias.items():
            logits[:, int(key)] += value
        found["masked"] = logits
    presence, frequency = params.get("presence_penalty", 0.0), params.get("frequency_penalty", 0.0)
    if presence or frequency:
        alone, both = rows.astype(np.float64), logits.copy()
        for row in range(1, len(rows)):
            ids, counts = np.unique(np.asarray(completion[:row]), return_counts=True)
            minus = presence + frequency * counts
            alone[row, ids] -= minus
            both[row, ids] -= minus
        found["penalised"] = alone
        if bias:
            found["masked+penalised"] = both
    return found


def candidates(
    rows: NDArray[np.float32], params: Mapping[str, Any], completion: Sequence[int]
) -> list[tuple[str, Floats]]:
    """Return every distribution that rows may be reported as, by name, the simplest first.

    A name occurs twice if truncation before and after the temperature both apply.
    """
    shaping, changed = shaping_of(params), changed_logits(rows, params, completion)
    named = [*distributions(rows, shaping, changed).items()]
    if shaping.truncates and shaping.divisor != 1:
        first = Shaping(top_k=shaping.top_k, top_p=shaping.top_p, min_p=shaping.min_p)
        for name, cut in distributions(rows, first, changed).items():
            if name.endswith("kept"):
                with np.errstate(invalid="ignore"):
                    named.append((name.replace("kept", "renormalised"), tempered(cut, shaping.divisor)))
    return [(_full_name(name, shaping), values) for name, values in named]


def _full_name(name: str, shaping: Shaping) -> str:
    """Add the temperature to the names of truncated distributions."""
    if shaping.divisor == 1 or "temperature" in name:
        return name
    for word in ("kept", "renormalised"):
        if name.endswith(word):
            return name.removesuffix(word) + f"temperature+{word}"
    return name
