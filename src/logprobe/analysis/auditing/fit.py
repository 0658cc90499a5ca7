"""Find the distribution that reported logprobs fit best, measure errors, and find the cause if none fits.

The replies to requests that differ only in the prompt (`Group`s) become a `Fitted`: each reported logprob
with its exact value in the distribution that fits best. `judge` and `check_alternatives` add findings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from logprobe.analysis import measures
from logprobe.analysis.auditing.distributions import candidates, fitted_temperature
from logprobe.analysis.auditing.report import Errors, Evidence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.auditing.forms import Ask
    from logprobe.analysis.auditing.report import Findings
    from logprobe.analysis.auditing.rows import Group, Place
    from logprobe.analysis.auditing.tokens import Tokens
    from logprobe.analysis.measures import Floats

CAP: Final = 3.0  # nats; maximum error that one logprob counts against a distribution
IMPOSSIBLE: Final = -9000.0  # nats; servers write -9999 for a probability of zero
UNLIKELY: Final = -80.0  # nats; a float32 softmax underflows below about this value
BETTER: Final = 5.0  # a cause must explain logprobs this many times better than the requested distribution
SYSTEMATIC: Final = 0.2  # share of wrong logprobs above which a common cause is searched for
TAIL: Final = 0.9  # second quantile to check, because a constant per row fits the median of any logprobs
SAME_FACTOR: Final = 0.01  # two factors with a smaller relative difference are equal
MIN_NUMBERS: Final = 20  # number of different logprobs needed to detect rounding
TIE: Final = 1e-6  # nats; two logprobs with a smaller difference are equal
MAX_SEARCHED: Final = 16  # number of logprobs used to search for an unknown temperature


@dataclass(slots=True)
class Fitted:
    """N logprobs reported for requests that differ only in the prompt, and the best-fitting distribution.

    All arrays are (N,), and logprobs are in nats.
    """

    name: str
    tokens: Tokens
    places: list[tuple[Group, Place]]
    theirs: Floats  # reported by the server; -inf if reported as impossible
    ours: Floats  # exact value in the best-fitting distribution
    raw: Floats  # exact value in the model's raw distribution
    ids: NDArray[np.int64]
    is_chosen: NDArray[np.bool_]  # False for an alternative
    rounding: str | None  # precision to which the server's logprobs are rounded, if coarser than float32

    @property
    def ask(self) -> Ask:
        """The request; all groups have the same request apart from the prompt."""
        return self.places[0][0].ask

    @property
    def label(self) -> str:
        """Description of the request and of the rows (prompt or completion), for reports."""
        return f"{self.ask.label} ({self.ask.where} rows)"

    @property
    def errors(self) -> Floats:
        """Distance of each reported logprob from the exact one, in nats."""
        return distance(self.theirs, self.ours)

    @property
    def allowance(self) -> Floats:
        """The part of each error that rounding may explain, in nats."""
        return allowance_of(self.rounding, self.theirs)

    def is_off(self, max_nats: float) -> NDArray[np.bool_]:
        """Return a mask of the logprobs whose error exceeds `max_nats` plus what rounding explains."""
        return np.asarray(self.errors > max_nats + self.allowance)

    def by_row(self) -> list[NDArray[np.int64]]:
        """Return, for each row of a reply, the indices of its logprobs."""
        starts = [at for at in range(1, len(self.places)) if self.places[at][1] is not self.places[at - 1][1]]
        return np.split(np.arange(len(self.places)), starts)

    def evidence(self, member: NDArray[np.bool_]) -> list[Evidence]:
        """Return evidence for the five largest errors among the logprobs in the mask `member`."""
        chosen = np.flatnonzero(member)
        return [
            self.evidence_at(index) for index in chosen[np.argsort(-self.errors[chosen], kind="stable")][:5]
        ]

    def evidence_at(self, index: int | np.integer[Any], note: str = "") -> Evidence:
        """Return the logprob at `index` as evidence."""
        group, place = self.places[index]
        token = self.tokens.show(int(self.ids[index]))
        theirs, ours = finite(self.theirs[index]), finite(self.ours[index])
        return group.ask.evidence(group.first + place.t, token=token, theirs=theirs, ours=ours, note=note)


def finite(value: float) -> float | None:
    """Return `value` as a float, or None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def is_impossible(theirs: Floats) -> NDArray[np.bool_]:
    """Return a mask of the reported logprobs that say that a token is impossible."""
    return np.asarray((theirs <= IMPOSSIBLE) | ~np.isfinite(theirs))


def distance(theirs: Floats, ours: Floats) -> Floats:
    """Return |theirs - ours| in nats; 0 if both are impossible, at least `CAP` if only one is."""
    never = ~np.isfinite(ours)
    with np.errstate(invalid="ignore"):
        plain = np.abs(theirs - ours)
    both = np.where(never | (ours < UNLIKELY), 0.0, np.maximum(CAP, np.abs(np.where(never, 0, ours))))
    return np.where(is_impossible(theirs), both, np.where(never, CAP, plain))


# -- the distribution that fits best -------------------------------------------------------------------------


def fit(groups: Sequence[Group], tokens: Tokens) -> Fitted | None:
    """Find the distribution that the logprobs in `groups` fit best, the simplest one if several fit equally.

    Returns None if no logprob can be assigned to a token.
    """
    entries = [
        (group, place, ids, -np.inf if number is None else number, is_chosen)
        for group in groups
        for place in group.places
        for ids, number, is_chosen in place.entries
        if ids
    ]
    if not entries:
        return None
    theirs = np.array([number for *_, number, _ in entries])
    named = [candidates(group.rows, group.ask.params, group.counted) for group in groups]
    fits = []
    for tables in zip(*named, strict=True):
        values, ids = np.zeros(len(entries)), np.zeros(len(entries), np.int64)
        rows_of = {id(group): rows for group, (_, rows) in zip(groups, tables, strict=True)}
        for index, (group, place, options, number, _) in enumerate(entries):
            numbers = rows_of[id(group)][place.t, options]
            nearest = int(np.argmin(distance(np.full(len(options), number), numbers))) if options[1:] else 0
            values[index], ids[index] = numbers[nearest], options[nearest]
        score = float(np.minimum(distance(theirs, values), CAP).mean())
        fits.append((score, tables[0][0], values, ids))
    least = min(score for score, *_ in fits)
    _, name, ours, ids = next(one for one in fits if one[0] <= least + TIE)
    return Fitted(
        name=name,
        tokens=tokens,
        places=[(group, place) for group, place, *_ in entries],
        theirs=theirs,
        ours=ours,
        raw=fits[0][2],
        ids=ids,
        is_chosen=np.array([is_chosen for *_, is_chosen in entries]),
        rounding=rounding_of(theirs),
    )


def errors_of(fitted: Fitted) -> list[Errors]:
    """Summarize the errors of the chosen tokens and of the alternatives, if there are any."""
    found = [_errors(fitted, fitted.is_chosen, "chosen"), _errors(fitted, ~fitted.is_chosen, "alternatives")]
    return [errors for errors in found if errors is not None]


def _errors(
    fitted: Fitted, member: NDArray[np.bool_], of: Literal["chosen", "alternatives"]
) -> Errors | None:
    if not member.any():
        return None
    errors = fitted.errors[member]
    is_given = member & ~fitted.is_chosen & np.isfinite(fitted.ours) & ~is_impossible(fitted.theirs)
    rows = [row[is_given[row]] for row in fitted.by_row()]
    flips = [gap for row in rows for gap in _flips(fitted, row)]
    divergences = [_kl(fitted, row) for row in rows if len(row)]
    return Errors(
        ask=fitted.label,
        of=of,
        distribution=fitted.name,
        count=len(errors),
        worst=float(errors.max()),
        mean=float(errors.mean()),
        p99=float(np.quantile(errors, 0.99)),
        kl=float(np.mean(divergences)) if divergences else None,
        rank_flips=len(flips),
        widest_flip=max(flips, default=None),
    )


def _flips(fitted: Fitted, row: NDArray[np.int64]) -> Iterator[float]:
    """Yield the exact difference, in nats, for each pair of alternatives reported in the wrong order."""
    for a, b in combinations(row, 2):
        ours, theirs = fitted.ours[a] - fitted.ours[b], fitted.theirs[a] - fitted.theirs[b]
        if ours * theirs < 0 and abs(ours) > TIE:
            yield abs(float(ours))


def _kl(fitted: Fitted, row: NDArray[np.int64]) -> float:
    """Return KL(ours ‖ theirs) in nats over the reported tokens, with all other tokens lumped into one."""
    one_each = row[np.unique(fitted.ids[row], return_index=True)[1]]
    ours, theirs = measures.lumped(fitted.ours[one_each]), measures.lumped(fitted.theirs[one_each])
    # If the probabilities sum to more than 1, nothing is left for the other tokens.
    return max(float(measures.kl_divergence(ours, np.maximum(theirs, math.log(1e-12)))), 0.0)


# -- numbers that were not computed, and rounded ones --------------------------------------------------------


def filled_in(fitted: Fitted, max_nats: float) -> NDArray[np.bool_]:
    """Return a mask of the wrong logprobs that were not computed: zeros, floors, or one repeated value."""
    off = fitted.is_off(max_nats)
    is_floor = is_impossible(fitted.theirs) & (fitted.ours > UNLIKELY)
    filled = off & ((fitted.theirs == 0) | is_floor)
    numbers, counts = np.unique(fitted.theirs[off], return_counts=True)
    for number, count in zip(numbers, counts, strict=True):
        same = off & (fitted.theirs == number)
        num_ours = len(np.unique(np.round(fitted.ours[same], 6)))
        if count >= 4 and num_ours >= 4 and count > off.sum() / 10 and fitted.allowance.max() == 0:
            filled |= same
    return np.asarray(filled)


def rounding_of(numbers: Floats) -> str | None:
    """Return the precision of logprobs ("2 decimals", "bfloat16", ...), or None if it is float32."""
    values = np.unique(numbers[~is_impossible(numbers) & (numbers != 0)])
    if len(values) < MIN_NUMBERS:
        return None
    for digits in range(5):
        if np.all(np.abs(values * 10**digits - np.round(values * 10**digits)) < 1e-6):
            return f"{digits} decimals"
    if np.all(values.astype(np.float32).view(np.uint32) & 0xFFFF == 0):
        return "bfloat16"
    return "float16" if np.all(values == values.astype(np.float16)) else None


def allowance_of(rounding: str | None, numbers: Floats) -> Floats:
    """Return by how much rounding or truncation may have changed each logprob at most, in nats."""
    size = np.abs(np.where(is_impossible(numbers), 0.0, numbers))
    if rounding is None:
        return np.zeros(len(numbers))
    if rounding == "bfloat16":
        return np.asarray(size * 2.0**-7)
    if rounding == "float16":
        return np.asarray(size * 2.0**-10 + 1e-7)
    return np.full(len(numbers), 10.0 ** -int(rounding[0]))


# -- one cause of all errors ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cause:
    """An explanation for logprobs that do not fit the requested distribution."""

    kind: str
    distribution: str
    correction: str
    explained: Floats  # (N,) reported values that the cause predicts; NaN where it predicts none
    detail: str = ""


def cause_of(fitted: Fitted, filled: NDArray[np.bool_], max_nats: float) -> Cause | None:
    """Return the first cause that explains the logprobs far better than the requested distribution."""
    used = ~filled & np.isfinite(fitted.ours) & ~is_impossible(fitted.theirs)
    is_off = fitted.is_off(max_nats)[used]
    if used.sum() < 3 or is_off.mean() < SYSTEMATIC or float(np.median(fitted.errors[used])) <= max_nats:
        return None
    for cause in _causes(fitted, used):
        covered = used & np.isfinite(cause.explained)
        if covered.sum() < 3:
            continue
        errors = fitted.errors[covered]
        left = np.abs(cause.explained - fitted.theirs)[covered] - fitted.allowance[covered]
        if all(np.quantile(left, q) <= max(np.quantile(errors, q) / BETTER, 1e-9) for q in (0.5, TAIL)):
            return cause
    return None


def _causes(fitted: Fitted, used: NDArray[np.bool_]) -> Iterator[Cause]:
    """Yield possible causes, the simplest first."""
    if np.all((fitted.theirs[used] >= 0) & (fitted.theirs[used] <= 1)):
        yield Cause("probabilities", "none", "take the natural logarithm", np.exp(fitted.ours))
    for base in (2, 10):
        correction = f"divide logprobs by {1 / math.log(base):.4f}"
        yield Cause("log-base", "none", correction, fitted.raw / math.log(base), str(base))
    if fitted.ask.wants_prompt:
        yield from _shifts(fitted)
    rows = [row[used[row]] for row in fitted.by_row()]
    rows = [row for row in rows if len(np.unique(fitted.ids[row])) >= 3]
    temperature = _temperature_by_rows(fitted, rows) if rows else _temperature_by_numbers(fitted, used)
    if temperature is None:
        return
    norms = {
        id(place): measures.logsumexp(group.rows[place.t].astype(np.float64) / temperature)
        for group, place in fitted.places
    }
    tempered = fitted.raw / temperature - np.array([norms[id(place)] for _, place in fitted.places])
    is_one = abs(temperature - 1) < SAME_FACTOR
    if not is_one:
        factor = f"{temperature:.4g}"
        correction = f"multiply logits by {factor}: log_softmax({factor} * logprobs) of whole rows"
        yield Cause("temperature-unasked", "scaled", correction, tempered, f"{temperature:.3g}")
    added = np.full(len(fitted.theirs), np.nan)
    for row in rows:
        added[row] = np.median(fitted.theirs[row] - tempered[row])
    if rows and float(np.nanmedian(added)) > 0:
        yield Cause(
            "renormalised-unasked",
            "renormalised" if is_one else "scaled+renormalised",
            "add log_kept_mass, the logarithm of the mass of what was kept, to each row",
            tempered + added,
            "" if is_one else f", after a temperature of {temperature:.3g}",
        )


def _shifts(fitted: Fitted) -> Iterator[Cause]:
    """Yield the causes in which tokens have a neighbor's logprob, or one from a neighboring row."""
    for by in (1, -1):
        for is_row in (False, True):
            moved = np.full(len(fitted.theirs), np.nan)
            for index, (group, place) in enumerate(fitted.places):
                t = place.t + by
                if 0 <= t < len(group.rows) and fitted.is_chosen[index]:
                    moved[index] = group.rows[t, fitted.ids[index] if is_row else group.ids[t]]
            yield Cause("shifted", "none", f"take the row {-by:+d}", moved)


def _temperature_by_rows(fitted: Fitted, rows: Sequence[NDArray[np.int64]]) -> float | None:
    """Estimate a temperature from the differences between logprobs within rows.

    The estimate is the median ratio of reported to exact differences, weighted by the exact differences.
    """
    ours = np.concatenate([fitted.raw[row] - fitted.raw[row].mean() for row in rows])
    theirs = np.concatenate([fitted.theirs[row] - fitted.theirs[row].mean() for row in rows])
    given = np.abs(ours) > TIE
    if not given.any():
        return None
    factors = theirs[given] / ours[given]
    order = np.argsort(factors)
    weights = np.cumsum(np.abs(ours[given])[order])
    factor = float(factors[order][np.searchsorted(weights, weights[-1] / 2)])
    return 1 / factor if factor > 0.01 else None


def _temperature_by_numbers(fitted: Fitted, used: NDArray[np.bool_]) -> float:
    """Return the temperature that fits best if each row has only one logprob."""
    indices = np.flatnonzero(used)
    indices = indices[:: max(len(indices) // MAX_SEARCHED, 1)][:MAX_SEARCHED]
    rows = np.array([fitted.places[index][0].rows[fitted.places[index][1].t] for index in indices])
    return fitted_temperature(rows, fitted.ids[indices][:, None], fitted.theirs[indices][:, None])[0]


# -- faults --------------------------------------------------------------------------------------------------


def judge(fitted: Fitted, findings: Findings, max_nats: float) -> None:
    """Add faults for the logprobs in `fitted`; if a cause explains them, set `fitted.name` accordingly."""

    def add(kind: str, member: NDArray[np.bool_], detail: str = "", correction: str | None = None) -> None:
        if member.any():
            findings.add(
                kind,
                detail,
                evidence=fitted.evidence(member),
                worst=float(fitted.errors[member].max()),
                count=int(member.sum()),
                of=len(member),
                correction=correction,
            )

    if fitted.rounding is not None:
        worst = float(fitted.allowance.max()) / 2  # rounding changes at most half as much as truncation
        findings.add(
            "rounded",
            fitted.rounding,
            is_note=worst <= max_nats,
            evidence=[fitted.evidence_at(0)],
            worst=worst,
            count=len(fitted.theirs),
            of=len(fitted.theirs),
        )
    filled = filled_in(fitted, max_nats)
    add("filled-in", filled)
    off = fitted.is_off(max_nats) & ~filled
    cause = cause_of(fitted, filled, max_nats)
    if cause is None:
        add(
            "does-not-fit",
            off,
            "{count} of {of} numbers fit no distribution that was tried, off by up to {worst} nats",
        )
        return
    add(cause.kind, off, cause.detail, cause.correction)
    if "scaled+" in cause.distribution:
        add("temperature-unasked", off, cause.detail.rpartition(" ")[2])
    if cause.distribution != "none":
        fitted.ours = np.where(np.isfinite(cause.explained), cause.explained, fitted.ours)
    fitted.name = cause.distribution


def check_alternatives(fitted: Fitted, findings: Findings, max_nats: float) -> None:
    """Check that each row has as many alternatives as requested, and that they are the most likely tokens.

    Rows after truncation, masks or penalties are not checked.
    """
    if {*fitted.name.split("+")} & {"kept", "renormalised", "masked", "penalised", "none"}:
        return
    if float(np.median(fitted.errors - fitted.allowance)) > max_nats:  # probably another model's rows
        return
    tokens = fitted.tokens
    for first, *_ in fitted.by_row():
        group, place = fitted.places[first]
        listed = [ids for ids, _, is_chosen in place.entries if not is_chosen]
        if not listed or group.ask.num_top < 2:
            continue
        row = group.rows[place.t]
        best = [int(one) for one in np.argsort(-row, kind="stable")[: group.ask.num_top]]
        # Two tokens with the same text are one key in a map of texts.
        expected = len({tokens.vocabulary.token_text(one) if place.is_map else one for one in best})
        if len(listed) < expected:
            extent = f"{len(listed)} of {expected}"
            evidence = fitted.evidence_at(first, f"{extent} alternatives")
            findings.add("alternatives-cut", extent, evidence=[evidence])
        known = [ids[0] for ids in listed if len(ids) == 1]
        if len(known) < len(listed):
            continue
        chosen = group.ids[place.t]
        lowest = min((row[one] for one in known if one != chosen), default=row[chosen])
        left_out = [one for one in best if one not in known and row[one] > lowest + 2 * max_nats]
        if place.is_map:  # a token that no text identifies has no key in a map of texts
            left_out = [one for one in left_out if tokens.is_whole(one)]
        if left_out:
            evidence = fitted.evidence_at(first, f"{tokens.show(left_out[0])!r} is left out")
            findings.add("alternatives-wrong", evidence=[evidence])
