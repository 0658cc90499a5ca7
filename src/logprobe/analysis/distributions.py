"""Named distributions, derived from a model's raw log-probabilities, that a server may report.

They are computed in float64 by sorting, independently of the sampler's kernels, which are tested against
them.
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
GOLDEN: Final = (5**0.5 - 1) / 2  # share of the range that each step of the golden-section search keeps
NUM_STEPS: Final = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Request parameters that are applied after penalties and masks; a temperature of 0 counts as 1."""

    temperature: float = 1.0
    top_k: int = 0  # 0 or -1 keeps all tokens
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature", f"must be 0 or more, got {self.temperature}")
        require(self.top_k >= -1, "top_k", f"must be -1 or 0 (all) or positive, got {self.top_k}")
        require(0 < self.top_p <= 1, "top_p", f"must be in (0, 1], got {self.top_p}")
        require(0 <= self.min_p <= 1, "min_p", f"must be in [0, 1], got {self.min_p}")

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """Build the shaping from a request's parameters; other parameters are ignored."""
        return cls(**{one.name: params[one.name] for one in fields(cls) if one.name in params})

    @property
    def divisor(self) -> float:
        """The number that the logits are divided by."""
        return self.temperature or 1.0

    @property
    def truncates(self) -> bool:
        """True if top-k, top-p or min-p may exclude tokens; never true for a greedy request."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def distributions(
    rows: npt.ArrayLike, shaping: Shaping, changed: Mapping[str, npt.ArrayLike] | None = None
) -> dict[str, Floats]:
    """Return every distribution that a server may report for T positions, by name.

    Each is a (T, V) array of log-probabilities in nats, -inf for tokens that were cut off. `raw` is the
    model's own distribution, `temperature` has the temperature applied, `kept` has only the tokens that
    truncation keeps, and `renormalised` is `kept` scaled to a sum of 1. A distribution that would equal
    another is left out.

    Args:
        rows: (T, V) raw log-probabilities, in nats.
        shaping: the request's parameters.
        changed: (T, V) logits after masks, biases or penalties, by name. Further distributions made from
            these logits have names such as `masked+kept`.
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
    """Return every distribution that a server may report for a request, with its name, the simplest first.

    A name occurs twice if truncating before and after the temperature gives different distributions.

    Args:
        rows: (T, V) raw log-probabilities, in nats; row t follows tokens[:t].
        params: the request's parameters, by OpenAI's names.
        tokens: ids of the tokens that penalties count.
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
    """Return rows (T, V) after the request's logit bias and its penalties, by distribution name.

    Row t follows tokens[:t]. Repetition penalties are not supported: they divide logits, which cannot be
    computed from log-probabilities.
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
    """Divide logits or log-probabilities (..., V) by a temperature, and return their log-softmax in nats."""
    scaled = np.asarray(rows, np.float64) / temperature
    return scaled - measures.logsumexp(scaled)[..., None]


def _is_kept(rows: Floats, shaping: Shaping) -> NDArray[np.bool_]:
    """Return a mask of the tokens that top-k, then top-p, then min-p keep.

    Of equally likely tokens, the ones with lower ids are kept first.
    """
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
    """Return the temperature at which raw rows fit reported logprobs best, and the median error in nats.

    Args:
        rows: (T, V) raw log-probabilities, in nats.
        token_ids: (T, K) ids of the reported tokens.
        logprobs: (T, K) reported logprobs, in nats; at least one must be finite, and only finite ones are
            used.
    """
    raw, ids, numbers = np.asarray(rows, np.float64), np.asarray(token_ids), np.asarray(logprobs, np.float64)
    is_given = np.isfinite(numbers)
    require(is_given.any(), "logprobs", "contain no finite number")

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
