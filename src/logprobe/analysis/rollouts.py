"""Compare stored samples' logprobs with a trainer's: size, cause and correction of the mismatch.

The rollouts come from the sampler (q). The trainer (p) is a model in this process or a second file. The
trainer's target is the full softmax at the sampler's temperature. The sampler may have stored logprobs under
that distribution, under the raw distribution, or renormalized after truncation, and a file often does not say
which. All are tried, and the best match determines the correction.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard

import numpy as np

from logprobe.analysis import measures
from logprobe.analysis.comparison import CLIP, POSITIONS_A_CALL, whole_parts
from logprobe.analysis.distributions import Shaping, distributions, fitted_temperature, tempered
from logprobe.analysis.rollout_files import Rollout, read_rollouts
from logprobe.analysis.statistics import Spread, effective_share
from logprobe.errors import InputError, require
from logprobe.records.forms.finite import finite_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import nn

    from logprobe.analysis.measures import Floats
    from logprobe.analysis.scorer import Scorer
    from logprobe.records.info import LogprobsInfo
    from logprobe.records.values import IntArray

FITS_NATS: Final = 0.1  # maximum mean distance at which a distribution matches
FIT_POSITIONS: Final = 32  # number of positions used to fit an unknown temperature
FIT_GAIN: Final = 4.0  # a fitted temperature must be this many times closer than the known distributions
FAR_NATS: Final = 10.0  # cap on distances, which are infinite for tokens that are possible on one side only
HAIR_NATS: Final = 1e-9  # mean distances that differ by less count as equal
ROUNDING: Final = 1e-5  # the probabilities in a whole float32 row may sum to as little as 1 minus this


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Mismatch in nats between the logprobs of the trainer (p) and the sampler (q); ratios are p / q."""

    worst_nats: float  # maximum |logprob p - logprob q| over sampled tokens
    mean_nats: float
    bias: float  # mean of logprob p - logprob q
    # Mean of r - 1 - log r over token ratios r: estimates KL(q ‖ p) from the sampled tokens (Schulman 2020).
    k3: float
    kl: Spread  # KL(q ‖ p) per position
    total_variation: Spread
    # True if `kl` and `total_variation` use all tokens. If False, all tokens that were not reported are
    # lumped into one, so both are lower bounds.
    is_whole: bool
    token_ratio: Spread
    sequence_ratio: Spread  # product of the token ratios of a completion
    clipped_share: float  # share of token ratios outside [0.8, 1.2]
    sequence_clipped_share: float
    effective_share: float  # Kish's effective sample size of the token ratios / num_tokens
    sequence_effective_share: float

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, for JSON, with ±9999 for infinity."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return finite_fields(
            {name: value.to_dict() if isinstance(value, Spread) else value for name, value in values.items()}
        )


@dataclass(frozen=True, kw_only=True)
class RolloutReport:
    """The distribution under which the logprobs were stored, and their mismatch with a trainer's logprobs."""

    num_sequences: int
    num_tokens: int
    shaping: Shaping  # parameters that the samples were drawn with
    target: str  # the trainer's distribution in the ratios: "raw" or "temperature"
    distribution: str  # the distribution that matches the stored logprobs best, or "none"
    scale: float | None  # the fitted temperature if `distribution` is "scaled"
    errors: dict[str, float]  # by distribution: mean distance of the stored logprobs, nats
    correction: str | None  # advice; None if nothing needs correction or the cause is unknown
    as_stored: Mismatch  # of the stored logprobs with the trainer's target distribution
    corrected: Mismatch | None  # with the trainer's `distribution`: only numerical noise; None if "none"

    def is_right(self, max_nats: float) -> bool:
        """Return True if every stored logprob is within `max_nats` of the logprob under the target."""
        return self.as_stored.worst_nats <= max_nats

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, for JSON."""
        return {
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
            **asdict(self.shaping),
            "target": self.target,
            "distribution": self.distribution,
            "scale": self.scale,
            "errors": self.errors,
            "correction": self.correction,
            "as_stored": self.as_stored.to_dict(),
            "corrected": None if self.corrected is None else self.corrected.to_dict(),
        }


Rollouts: TypeAlias = "str | Path | Iterable[Rollout]"


def compare_rollouts(
    rollouts: Rollouts,
    other: Rollouts | Scorer | nn.Module,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    prompts: Mapping[str, Sequence[int]] | None = None,
) -> RolloutReport:
    """Compare the logprobs that a sampler stored with a trainer's logprobs of the same tokens.

    Args:
        rollouts: the sampler's completions: a Parquet file for `read_rollouts`, or `Rollout`s.
        other: the trainer: an `LLM`, a transformers model (used in its current train or eval mode), or the
            same completions as stored by the trainer.
        temperature: temperature of the samples. None reads it from the rollouts, or uses 1 if they lack it.
        top_k: top-k of the samples; 0 keeps all tokens. None reads it from the rollouts, or uses 0.
        top_p: top-p of the samples. None reads it from the rollouts, or uses 1.
        min_p: min-p of the samples. None reads it from the rollouts, or uses 0.
        prompts: prompt ids by completion name, for files without prompts.

    Raises:
        InputError: a file or column is missing, the tokens differ, or a model needs a prompt that is missing.
        ParameterError: no completion has logprobs.
        BatchError: a request failed.
    """
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: value for name, value in asked.items() if value is not None}
    mine = _rollouts(rollouts, prompts)
    table = _Table(given)
    if _is_stored(other):
        _add_stored(table, mine, _rollouts(other, prompts))
    else:
        for rollout in mine:
            for start, rows in _rows_of(other, rollout):
                table.add(rollout, start, len(rows), rows)
    return table.report()


def _rollouts(source: Rollouts, prompts: Mapping[str, Sequence[int]] | None) -> Iterator[Rollout]:
    return read_rollouts(source, prompts) if isinstance(source, str | Path) else iter(source)


def _is_stored(other: Rollouts | Scorer | nn.Module) -> TypeGuard[Rollouts]:
    return isinstance(other, str | Path) or not (hasattr(other, "score") or callable(other))


# -- the trainer's rows --------------------------------------------------------------------------------------


def _rows_of(model: Any, rollout: Rollout) -> Iterator[tuple[int, Floats]]:
    """Yield a model's raw rows for ranges of a completion's positions.

    Each item is the first position of the range and an (n, V) array of log-probabilities, in nats.
    """
    prompt = rollout.prompt_ids
    if prompt is None or not len(prompt):
        raise InputError(
            f"{rollout.name}: has no prompt ids, which a model requires; store them, or pass prompts"
        )
    rows = _scored_rows if hasattr(model, "score") else _module_rows
    yield from rows(model, np.concatenate([prompt, rollout.token_ids]), len(prompt))


def _scored_rows(llm: Scorer, ids: IntArray, start: int) -> Iterator[tuple[int, Floats]]:
    for begin, _, part in whole_parts(llm, ids, POSITIONS_A_CALL, start):
        yield begin - start, part.rows.astype(np.float64)


def _module_rows(model: Any, ids: IntArray, start: int) -> Iterator[tuple[int, Floats]]:
    import torch

    weight = model.get_input_embeddings().weight
    if ids.max() >= len(weight):
        raise InputError(
            f"token id {ids.max()} is outside the model's {len(weight)} embeddings; use the sampler's model"
        )
    with torch.no_grad():
        tokens = torch.as_tensor(ids, dtype=torch.long, device=weight.device)[None]
        logits = model(input_ids=tokens).logits[0, start - 1 : -1]
        for begin in range(0, len(logits), POSITIONS_A_CALL):
            rows = logits[begin : begin + POSITIONS_A_CALL].float().cpu().numpy()
            yield begin, tempered(rows, 1.0)


# -- compare two files ---------------------------------------------------------------------------------------


def _add_stored(table: _Table, rollouts: Iterable[Rollout], others: Iterable[Rollout]) -> None:
    for mine, theirs in zip_longest(rollouts, others):
        if mine is None or theirs is None:
            raise InputError(
                "the two files have different numbers of completions; compare files of the same completions"
            )
        if not np.array_equal(mine.token_ids, theirs.token_ids):
            raise InputError(f"{mine.name}, {theirs.name}: tokens differ; compare the same completions")
        for start in range(0, len(mine), POSITIONS_A_CALL):
            stop = min(start + POSITIONS_A_CALL, len(mine))
            table.add(mine, start, stop - start, _Entries.of(theirs, start, stop))


@dataclass(frozen=True, slots=True)
class _Entries:
    """Reported tokens at n positions, padded to K tokens each; column 0 has the sampled token."""

    token_ids: IntArray  # (n, K)
    logprobs: Floats  # (n, K) nats, -inf in the padding
    is_there: NDArray[np.bool_]  # (n, K), False in the padding

    @classmethod
    def of(cls, rollout: Rollout, start: int, stop: int) -> _Entries:
        """Collect the reported tokens at positions [start, stop) of a rollout."""
        ids, logprobs = rollout.token_ids[start:stop, None], rollout.logprobs[start:stop, None]
        is_there = np.ones(ids.shape, np.bool_)
        top = rollout.alternatives
        if top is None:
            return cls(ids, logprobs, is_there)
        bounds = np.asarray(top.offsets[start : stop + 1], np.int64)
        entries = slice(int(bounds[0]), int(bounds[-1]))
        widths = np.diff(bounds)
        has_entry = np.arange(widths.max(initial=0)) < widths[:, None]
        other_ids, others = np.zeros(has_entry.shape, np.int64), np.full(has_entry.shape, -np.inf)
        other_ids[has_entry], others[has_entry] = top.token_ids[entries], top.logprobs[entries]
        has_entry &= (other_ids != ids) & ~np.isnan(others)
        others[~has_entry] = -np.inf
        return cls(
            np.concatenate([ids, other_ids], axis=1),
            np.concatenate([logprobs, others], axis=1),
            np.concatenate([is_there, has_entry], axis=1),
        )

    def only(self, keep: NDArray[np.bool_]) -> _Entries:
        """Return only the positions that the mask `keep`, (n,) bool, selects."""
        return _Entries(self.token_ids[keep], self.logprobs[keep], self.is_there[keep])

    def at(self, wanted: _Entries) -> Floats:
        """Look up the tokens in `wanted` and return their logprobs, (n, K) nats; NaN if not reported."""
        numbers = np.full(wanted.token_ids.shape, np.nan)
        for row, ids in enumerate(wanted.token_ids):
            order = np.argsort(self.token_ids[row], kind="stable")
            order = order[self.is_there[row][order]]
            own = self.token_ids[row][order]
            places = np.minimum(np.searchsorted(own, ids), len(own) - 1)
            is_found = (own[places] == ids) & wanted.is_there[row]
            numbers[row, is_found] = self.logprobs[row][order][places[is_found]]
        return numbers


# -- accumulate over all positions ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """The sampler's log-probabilities at n positions, compared with one of the trainer's distributions."""

    chosen: Floats  # (n,), the trainer's logprobs of the sampled tokens
    distance: Floats  # (n,), nats, mean |logprob q - logprob p| of the reported tokens
    kl: Floats  # (n,), nats
    total_variation: Floats  # (n,)
    is_whole: NDArray[np.bool_]  # (n,), True if the reported tokens have all of the sampler's probability


class _Table:
    """Collects the sampler's logprobs, and the trainer's logprobs under each candidate distribution."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = asked
        self._shaping: Shaping | None = None
        self._scale: float | None = None
        self._parts: dict[str, list[_Part]] = {}
        self._sampled: list[Floats] = []
        self._sequences: list[IntArray] = []  # for each position, the index of the completion
        self._num_sequences = 0
        self._has_mass = False

    def add(self, rollout: Rollout, start: int, count: int, trainer: Floats | _Entries) -> None:
        """Add `count` positions of a rollout, from `start` on.

        `trainer` has the trainer's raw rows, (count, V) nats, or the logprobs that the trainer stored.
        """
        shaping = self._shaping_of(rollout)
        self._num_sequences += start == 0
        stop = start + count
        sampler = _Entries.of(rollout, start, stop)
        mass = None if rollout.log_kept_mass is None else rollout.log_kept_mass[start:stop]
        keep = ~np.isnan(sampler.logprobs[:, 0])
        if mass is not None:
            keep &= ~np.isnan(mass)
        if isinstance(trainer, _Entries):
            keep &= ~np.isnan(trainer.logprobs[:, 0])
        if rollout.is_counted is not None:
            keep &= rollout.is_counted[start:stop]
        if not keep.any():
            return
        if isinstance(trainer, _Entries):
            named = _stored_numbers(trainer, sampler, shaping, mass)
        else:
            named = self._model_numbers(trainer, sampler, shaping, mass, keep)
        sampler = sampler.only(keep)
        for name, numbers in named.items():
            self._parts.setdefault(name, []).append(_part(sampler, numbers[keep]))
        self._sampled.append(sampler.logprobs[:, 0])
        self._sequences.append(np.full(int(keep.sum()), self._num_sequences - 1))

    def _shaping_of(self, rollout: Rollout) -> Shaping:
        shaping = Shaping(**_told(rollout.info) | dict(self._asked))
        has_mass = rollout.log_kept_mass is not None
        if self._shaping is None:
            self._shaping, self._has_mass = shaping, has_mass
        if shaping != self._shaping:
            raise InputError(
                f"{rollout.name}: sampled with {shaping}, others with {self._shaping}; compare "
                "them separately"
            )
        if has_mass != self._has_mass:
            raise InputError(
                f"{rollout.name}: only some completions have log_kept_mass; compare these separately"
            )
        return shaping

    def _model_numbers(
        self,
        rows: Floats,
        sampler: _Entries,
        shaping: Shaping,
        mass: Floats | None,
        keep: NDArray[np.bool_],
    ) -> dict[str, Floats]:
        require(
            int(sampler.token_ids.max()) < rows.shape[1],
            "other",
            "has no output for some token ids of the rollouts; use the sampler's model",
        )
        # Use the sampler's kept mass if known, because rounding may change which tokens truncation keeps.
        known = shaping if mass is None else Shaping(temperature=shaping.temperature)
        named = distributions(rows, known)
        numbers = {name: np.take_along_axis(row, sampler.token_ids, 1) for name, row in named.items()}
        if "kept" in named:
            mass = measures.logsumexp(named["kept"])
        if mass is not None:
            numbers["renormalised"] = _renormalised(numbers.get("temperature", numbers["raw"]), sampler, mass)
        if not self._parts:
            self._scale = _scale(rows, sampler, numbers, np.flatnonzero(keep)[:FIT_POSITIONS])
        if self._scale is not None:
            numbers["scaled"] = np.take_along_axis(tempered(rows, self._scale), sampler.token_ids, 1)
        return numbers

    def report(self) -> RolloutReport:
        """Compute the report.

        Raises:
            ParameterError: nothing was added.
        """
        require(self._sampled, "rollouts", "have no tokens with logprobs; store logprobs with the tokens")
        assert self._shaping is not None
        columns = {
            name: _Part(
                *(np.concatenate([getattr(part, entry.name) for part in parts]) for entry in fields(_Part))
            )
            for name, parts in self._parts.items()
        }
        errors = {name: float(column.distance.mean()) for name, column in columns.items()}
        target = "temperature" if "temperature" in columns else "raw"
        distribution = _best(errors)
        sampled = np.concatenate(self._sampled)
        _, sequences = np.unique(np.concatenate(self._sequences), return_inverse=True)
        mismatches = {
            name: _mismatch(columns[name], sampled, sequences) for name in {target, distribution} - {"none"}
        }
        scale = self._scale if distribution == "scaled" else None
        return RolloutReport(
            num_sequences=len(np.unique(sequences)),
            num_tokens=len(sampled),
            shaping=self._shaping,
            target=target,
            distribution=distribution,
            scale=scale,
            errors=errors,
            correction=_correction(distribution, target, self._shaping, scale, has_mass=self._has_mass),
            as_stored=mismatches[target],
            corrected=mismatches.get(distribution),
        )


def _told(info: LogprobsInfo | None) -> dict[str, Any]:
    """Return the sampling parameters that a record's `LogprobsInfo` names."""
    if info is None:
        return {}
    values = {name: getattr(info, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {name: value for name, value in values.items() if value is not None}


def _stored_numbers(
    trainer: _Entries, sampler: _Entries, shaping: Shaping, mass: Floats | None
) -> dict[str, Floats]:
    """Return the trainer's stored logprobs by distribution.

    The distributions are the trainer's target and, if the sampler's kept mass is known, the target
    renormalized after truncation.
    """
    numbers = trainer.at(sampler)
    target = "temperature" if shaping.divisor != 1 else "raw"
    if mass is None:
        return {target: numbers}
    return {target: numbers, "renormalised": _renormalised(numbers, sampler, mass)}


def _renormalised(numbers: Floats, sampler: _Entries, mass: Floats) -> Floats:
    """Renormalize logprobs over the tokens that the sampler kept, whose logprobs in `sampler` are finite."""
    return np.where(np.isneginf(sampler.logprobs), -np.inf, numbers - mass[:, None])


def _scale(
    rows: Floats, sampler: _Entries, numbers: Mapping[str, Floats], few: NDArray[np.intp]
) -> float | None:
    """Fit a temperature to the positions `few`; return None unless it fits far better than all `numbers`."""
    reported = np.where(sampler.is_there, sampler.logprobs, -np.inf)[few]
    given = np.isfinite(reported)
    if not given.any():
        return None
    scale, error = fitted_temperature(rows[few], sampler.token_ids[few], reported)
    others = [float(np.median(np.abs(told[few][given] - reported[given]))) for told in numbers.values()]
    return scale if error * FIT_GAIN < min(others) else None


def _part(sampler: _Entries, numbers: Floats) -> _Part:
    is_both = sampler.is_there & ~np.isnan(numbers)
    mine, theirs = (np.where(is_both, values, -np.inf) for values in (sampler.logprobs, numbers))
    with np.errstate(invalid="ignore"):
        apart = np.where(mine == theirs, 0.0, np.minimum(np.abs(mine - theirs), FAR_NATS))
    rows, others = measures.lumped(mine), measures.lumped(theirs)
    is_whole = rows[:, -1] < np.log(ROUNDING)
    rows[is_whole, -1] = -np.inf
    return _Part(
        chosen=numbers[:, 0],
        distance=apart.sum(axis=1) / is_both.sum(axis=1),
        kl=np.maximum(measures.kl_divergence(rows, others), 0.0),
        total_variation=measures.total_variation(rows, others),
        is_whole=is_whole,
    )


def _best(errors: Mapping[str, float]) -> str:
    """Return the distribution with the smallest error, or "none" if no distribution matches.

    "scaled" must be `FIT_GAIN` times closer than all others.
    """
    told = {name: error for name, error in errors.items() if name != "scaled"}
    least = min(told.values())
    best = next(name for name, error in told.items() if error <= least + HAIR_NATS)
    if errors.get("scaled", np.inf) * FIT_GAIN < least:
        best = "scaled"
    return best if errors[best] <= FITS_NATS else "none"


def _correction(
    distribution: str, target: str, shaping: Shaping, scale: float | None, *, has_mass: bool
) -> str | None:
    if distribution == "renormalised":
        held = "which the file has" if has_mass else "which the file lacks: let the sampler report it"
        return f"add log_kept_mass to the sampler's logprobs ({held}): they are renormalized after truncation"
    if distribution == "scaled":
        return f"divide the trainer's logits by {scale:.4g}: the sampler's logprobs use that temperature"
    if distribution == "raw" != target:
        return (
            f"let the sampler report processed logprobs (at its temperature of {shaping.divisor:g}) and "
            "log_kept_mass, and add the two: the stored logprobs are raw, but the trainer's are at that "
            "temperature"
        )
    return None


@np.errstate(invalid="ignore")  # quantiles and shares of infinite ratios are NaN
def _mismatch(column: _Part, sampled: Floats, sequences: NDArray[np.integer[Any]]) -> Mismatch:
    logs = np.where(column.chosen == sampled, 0.0, column.chosen - sampled)
    by_sequence = np.asarray(np.bincount(sequences, weights=logs), np.float64)
    token_ratios, sequence_ratios = (
        measures.importance_ratios(values, np.zeros(len(values))) for values in (logs, by_sequence)
    )
    return Mismatch(
        worst_nats=float(np.abs(logs).max()),
        mean_nats=float(np.abs(logs).mean()),
        bias=float(logs.mean()),
        k3=float(np.mean(np.where(np.isfinite(logs), token_ratios - 1 - logs, np.inf))),
        kl=Spread.of(column.kl),
        total_variation=Spread.of(column.total_variation),
        is_whole=bool(column.is_whole.all()),
        token_ratio=Spread.of(token_ratios),
        sequence_ratio=Spread.of(sequence_ratios),
        clipped_share=float(np.mean(np.abs(token_ratios - 1) > CLIP)),
        sequence_clipped_share=float(np.mean(np.abs(sequence_ratios - 1) > CLIP)),
        effective_share=effective_share(logs),
        sequence_effective_share=effective_share(by_sequence),
    )
