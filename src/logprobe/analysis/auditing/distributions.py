"""Named distributions that a model's row may be reported as.

Computed in float64 by sorting, independently of the sampler's kernels, which are tested against it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from logprobe.analysis import measures
from logprobe.errors import require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from numpy.typing import NDArray

    from logprobe.analysis.measures import Floats

TEMPERATURES: Final = (0.05, 20.0)  # search range for an unknown temperature
GOLDEN: Final = (5**0.5 - 1) / 2  # golden section: share of the range that each step of the search keeps
NUM_STEPS: Final = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Request parameters applied to rows after penalties and masks; a temperature of 0 counts as 1."""

    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature", f"must be 0 or more, got {self.temperature}")
        require(self.top_k >= -1, "top_k", f"must be -1 or 0 (all) or positive, got {self.top_k}")
        require(0 < self.top_p <= 1, "top_p", f"must lie in (0, 1], got {self.top_p}")
        require(0 <= self.min_p <= 1, "min_p", f"must lie in [0, 1], got {self.min_p}")

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """Return the shaping that a request's parameters apply after penalties and masks."""
        return cls(**{one.name: params[one.name] for one in fields(cls) if one.name in params})

    @property
    def divisor(self) -> float:
        """Divisor of the logits."""
        return self.temperature or 1.0

    @property
    def truncates(self) -> bool:
        """True if tokens can be cut off; a greedy request cuts none."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def distributions(
    rows: npt.ArrayLike, shaping: Shaping, changed: Mapping[str, npt.ArrayLike] | None = None
) -> dict[str, Floats]:
    """Return every distribution that rows may be reported as, name → (T, V) nats, -inf for tokens cut off.

    `raw`; `temperature`; `kept`, the rest after truncation at the temperature; and `renormalised`, the same
    with a mass of 1. Distributions that would equal another one are left out.

    Args:
        rows: (T, V) raw log-probabilities, nats.
        shaping: the request's parameters.
        changed: name → (T, V) logits after masks, biases or penalties; the names of distributions made from
            them are prefixed with this name and a plus.
    """
    raw = np.asarray(rows, np.float64)
    shaped = _shaped(raw, shaping)
    for word, logits in (changed or {}).items():
        own = tempered(logits, 1.0)
        shaped |= {word: own} | {f"{word}+{name}": row for name, row in _shaped(own, shaping).items()}
    return {"raw": raw} | shaped


def _shaped(rows: Floats, shaping: Shaping) -> dict[str, Floats]:
    shaped: dict[str, Floats] = {}
    if shaping.divisor != 1:
        rows = shaped["temperature"] = tempered(rows, shaping.divisor)
    if shaping.truncates:
        cut = np.where(_is_kept(rows, shaping), rows, -np.inf)
        shaped |= {"kept": cut, "renormalised": cut - measures.logsumexp(cut)[..., None]}
    return shaped


def candidates(
    rows: npt.ArrayLike, params: Mapping[str, Any], tokens: Sequence[int]
) -> list[tuple[str, Floats]]:
    """Return every distribution that rows of a request may be of, by name, the simplest first.

    A name occurs twice if truncation before and after the temperature both apply. `tokens` are those that
    penalties count; row t follows tokens[:t].
    """
    shaping, changed = Shaping.of(params), changed_logits(rows, params, tokens)
    named = [*distributions(rows, shaping, changed).items()]
    if shaping.divisor == 1:
        return named
    if shaping.truncates:
        for name, cut in distributions(rows, replace(shaping, temperature=1.0), changed).items():
            if name.endswith("kept"):
                with np.errstate(invalid="ignore"):
                    named.append((name.replace("kept", "renormalised"), tempered(cut, shaping.divisor)))
    return [(re.sub(r"(kept|renormalised)$", r"temperature+\1", name), values) for name, values in named]


def changed_logits(
    rows: npt.ArrayLike, params: Mapping[str, Any], tokens: Sequence[int]
) -> dict[str, Floats]:
    """Return rows (T, V) after a bias or penalties, by distribution name; row t follows tokens[:t].

    Repetition penalties are not covered: they divide logits, which log-probabilities do not determine.
    """
    raw = np.asarray(rows, np.float64)
    bias = np.zeros(raw.shape[1])
    for token_id, value in (params.get("logit_bias") or {}).items():
        bias[int(token_id)] += value
    changed = {"masked": raw + bias} if bias.any() else {}
    presence, frequency = params.get("presence_penalty", 0.0), params.get("frequency_penalty", 0.0)
    if presence or frequency:
        penalty = np.zeros(raw.shape)
        for row in range(1, len(raw)):
            ids, counts = np.unique(np.asarray(tokens[:row], np.int64), return_counts=True)
            penalty[row, ids] = presence + frequency * counts
        changed["penalised"] = raw - penalty
        if bias.any():
            changed["masked+penalised"] = raw + bias - penalty
    return changed


def tempered(rows: npt.ArrayLike, temperature: float) -> Floats:
    """Return the log-softmax of logits or log-probabilities (..., V) divided by a temperature, nats."""
    scaled = np.asarray(rows, np.float64) / temperature
    return scaled - measures.logsumexp(scaled)[..., None]


def log_kept_mass(rows: npt.ArrayLike, shaping: Shaping) -> Floats:
    """Return the log of the mass that truncation keeps of raw rows (T, V) at the temperature, (T,) nats."""
    scaled = tempered(rows, shaping.divisor)
    if not shaping.truncates:
        return np.zeros(scaled.shape[:-1])
    return measures.logsumexp(np.where(_is_kept(scaled, shaping), scaled, -np.inf))


def _is_kept(rows: Floats, shaping: Shaping) -> NDArray[np.bool_]:
    """Return the mask of tokens kept by top-k, then top-p, then min-p; ties are in order of ascending id."""
    order = np.argsort(-rows, axis=-1, kind="stable")
    weights = np.exp(np.take_along_axis(rows, order, -1))
    weights /= weights[..., :1]
    places = np.arange(rows.shape[-1])
    is_kept = np.isfinite(np.take_along_axis(rows, order, -1))
    if shaping.top_k > 0:
        is_kept &= places < shaping.top_k
    if shaping.top_p < 1:
        sums = np.cumsum(np.where(is_kept, weights, 0.0), axis=-1)
        is_kept &= (sums < sums[..., -1:] * shaping.top_p)[..., np.maximum(places - 1, 0)] | (places == 0)
    is_kept &= (weights >= shaping.min_p) | (places == 0)
    by_id = np.empty_like(is_kept)
    np.put_along_axis(by_id, order, is_kept, -1)
    return by_id


def fitted_temperature(
    rows: npt.ArrayLike, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike
) -> tuple[float, float]:
    """Return the temperature at which raw rows are nearest to reported numbers, and the median error, nats.

    Args:
        rows: (T, V) raw log-probabilities, nats.
        token_ids: (T, K) ids of the reported tokens.
        logprobs: (T, K) reported numbers, nats; only finite ones are used, and there must be at least one.
    """
    raw, ids, numbers = np.asarray(rows, np.float64), np.asarray(token_ids), np.asarray(logprobs, np.float64)
    is_given = np.isfinite(numbers)
    require(is_given.any(), "logprobs", "hold no finite number")

    def error(log_temperature: float) -> float:
        given = np.take_along_axis(tempered(raw, float(np.exp(log_temperature))), ids, -1)
        return float(np.median(np.abs(given - numbers)[is_given]))

    low, high = (float(bound) for bound in np.log(TEMPERATURES))
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    left_error, right_error = error(left), error(right)
    for _ in range(NUM_STEPS):
        if left_error < right_error:
            high, right, right_error = right, left, left_error
            left = high - GOLDEN * (high - low)
            left_error = error(left)
        else:
            low, left, left_error = left, right, right_error
            right = low + GOLDEN * (high - low)
            right_error = error(right)
    best = (low + high) / 2
    return float(np.exp(best)), error(best)
