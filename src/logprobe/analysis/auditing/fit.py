"""Fit reported numbers to a distribution, measure their errors, and find the cause if none fits.

The rows of all replies to one ask (`Group`) become a `Fitted`: each number with its value in the distribution
that fits best. `judge` adds findings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from logprobe.analysis import measures
from logprobe.analysis.auditing.distributions import fitted_temperature
from logprobe.analysis.auditing.reference import candidates
from logprobe.analysis.auditing.report import Errors, Evidence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.auditing.findings import Findings
    from logprobe.analysis.auditing.forms import Ask
    from logprobe.analysis.auditing.report import Where
    from logprobe.analysis.auditing.tokens import Tokens
    from logprobe.analysis.measures import Floats

CAP: Final = 3.0  # nats: maximum that one number counts against a distribution
IMPOSSIBLE: Final = -9000.0  # servers write -9999 for a probability of zero
UNLIKELY: Final = -80.0  # nats: a float32 softmax ends about there
BETTER: Final = 5.0  # a cause must explain numbers this many times better than the requested distribution
SYSTEMATIC: Final = 0.2  # share of wrong numbers from which a common cause is searched
TAIL: Final = 0.9  # second quantile to check: a constant per row fits the median of any numbers
SAME_FACTOR: Final = 0.01  # relative difference of two equal factors
MIN_NUMBERS: Final = 20  # different numbers that show a rounding
TIE: Final = 1e-6  # nats
MAX_SEARCHED: Final = 16  # numbers used to search for an unknown temperature


@dataclass(slots=True)
class Place:
    """One row of a reply, with the ids that its entries may mean."""

    position: int
    t: int  # the row of ours
    entries: list[tuple[list[int], float | None, bool]]  # ids, logprob, whether it is the chosen token
    is_map: bool = False  # by texts: two tokens of one text are one entry


@dataclass(slots=True)
class Group:
    """The rows of one reply with the exact rows."""

    ask: Ask
    where: Where
    rows: NDArray[np.float32]  # (T, V) raw, nats
    context: tuple[int, ...]  # tokens before the first row
    ids: tuple[int, ...]  # (T,) tokens of the rows
    places: list[Place]

    @property
    def completion(self) -> tuple[int, ...]:
        """Tokens that penalties count; at row t, the first t."""
        return self.ids if self.where == "completion" else ()

    def evidence(
        self,
        position: int,
        token: str | None,
        note: str,
        theirs: float | None = None,
        ours: float | None = None,
    ) -> Evidence:
        """Return one position as evidence."""
        return Evidence(
            ask=self.ask.label,
            prompt=self.ask.shown,
            position=position,
            where=self.where,
            token=token,
            theirs=theirs,
            ours=ours,
            note=note,
        )


@dataclass(slots=True)
class Fitted:
    """All numbers of one ask with the distribution that fits them best; (N,) arrays."""

    name: str
    tokens: Tokens
    places: list[tuple[Group, Place]]
    theirs: Floats  # nats, -inf where a server says impossible
    ours: Floats
    raw: Floats
    ids: NDArray[np.int64]
    is_chosen: NDArray[np.bool_]
    allowance: Floats  # nats that rounding explains
    is_filled: NDArray[np.bool_]

    @property
    def ask(self) -> Ask:
        """The ask; equal for all groups except for the prompt."""
        return self.places[0][0].ask

    @property
    def label(self) -> str:
        """The ask, and the kind of the rows."""
        return f"{self.ask.label} ({self.places[0][0].where} rows)"

    @property
    def errors(self) -> Floats:
        """Distances from the distribution, nats."""
        return distance(self.theirs, self.ours)

    def by_row(self) -> Iterator[NDArray[np.int64]]:
        """Yield the indices of the numbers of each row."""
        start = 0
        for index in range(1, len(self.places) + 1):
            if index == len(self.places) or self.places[index][1] is not self.places[start][1]:
                yield np.arange(start, index)
                start = index

    def evidence(self, member: NDArray[np.bool_]) -> list[Evidence]:
        """Return evidence of the five worst of some numbers."""
        chosen = np.flatnonzero(member)
        order = chosen[np.argsort(-self.errors[chosen], kind="stable")][:5]
        return [self.evidence_at(int(index)) for index in order]

    def evidence_at(self, index: int, note: str = "") -> Evidence:
        """Return one number as evidence."""
        group, place = self.places[index]
        token = self.tokens.show(int(self.ids[index]))
        theirs, ours = finite(self.theirs[index]), finite(self.ours[index])
        return group.evidence(place.position, token, note, theirs, ours)


def finite(value: float) -> float | None:
    """Return a finite number, or None."""
    return float(value) if math.isfinite(value) else None


def distance(theirs: Floats, ours: Floats) -> Floats:
    """Return |theirs - ours|; 0 if both are impossible, at least `CAP` if one is."""
    is_low = (theirs <= IMPOSSIBLE) | ~np.isfinite(theirs)
    never = ~np.isfinite(ours)
    with np.errstate(invalid="ignore"):
        plain = np.abs(theirs - ours)
    both = np.where(never | (ours < UNLIKELY), 0.0, np.maximum(CAP, np.abs(np.where(never, 0, ours))))
    return np.where(is_low, both, np.where(never, CAP, plain))


# -- the distribution that fits best -------------------------------------------------------------------------


def fit(groups: Sequence[Group], tokens: Tokens) -> Fitted | None:
    """Return the distribution that the numbers of one ask are nearest to, the simplest of equal ones."""
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
    looked_up: dict[tuple[int, str], list[tuple[Floats, NDArray[np.int64]]]] = {}
    for group in groups:
        own = [(place, ids, number) for of, place, ids, number, _ in entries if of is group]
        for index, (name, rows) in enumerate(candidates(group.rows, group.ask.params, group.completion)):
            looked_up.setdefault((index, name), []).append(_looked_up(rows, own))
    ours = {key: np.concatenate([values for values, _ in parts]) for key, parts in looked_up.items()}
    scores = {key: float(np.minimum(distance(theirs, values), CAP).mean()) for key, values in ours.items()}
    least = min(scores.values())
    best = next(key for key, score in scores.items() if score <= least + TIE)
    return Fitted(
        name=best[1],
        tokens=tokens,
        places=[(group, place) for group, place, *_ in entries],
        theirs=theirs,
        ours=ours[best],
        raw=ours[0, "raw"],
        ids=np.concatenate([ids for _, ids in looked_up[best]]),
        is_chosen=np.array([is_chosen for *_, is_chosen in entries]),
        allowance=np.zeros(len(theirs)),
        is_filled=np.zeros(len(theirs), np.bool_),
    )


def _looked_up(
    rows: Floats, entries: Sequence[tuple[Place, list[int], float]]
) -> tuple[Floats, NDArray[np.int64]]:
    """Return the numbers of entries in rows, and their ids; of several possible ids, the nearest."""
    values, ids = np.zeros(len(entries)), np.zeros(len(entries), np.int64)
    for index, (place, options, number) in enumerate(entries):
        numbers = rows[place.t, options]
        nearest = int(np.argmin(distance(np.full(len(options), number), numbers))) if options[1:] else 0
        values[index], ids[index] = numbers[nearest], options[nearest]
    return values, ids


def errors_of(fitted: Fitted) -> list[Errors]:
    """Return the errors of chosen tokens and of alternatives."""
    found = []
    if fitted.is_chosen.any():
        found.append(_errors(fitted, fitted.is_chosen, "chosen"))
    if not fitted.is_chosen.all():
        found.append(_errors(fitted, ~fitted.is_chosen, "alternatives"))
    return found


def _errors(fitted: Fitted, member: NDArray[np.bool_], of: Literal["chosen", "alternatives"]) -> Errors:
    errors = fitted.errors[member]
    is_listed = of == "alternatives"
    flips = _flips(fitted) if is_listed else []
    return Errors(
        ask=fitted.label,
        of=of,
        distribution=fitted.name,
        count=len(errors),
        worst=float(errors.max()),
        mean=float(errors.mean()),
        p99=float(np.quantile(errors, 0.99)),
        kl=_kl(fitted) if is_listed else None,
        rank_flips=len(flips),
        widest_flip=max(flips, default=None),
    )


def _alternatives(fitted: Fitted) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of the alternatives of each row, where both numbers are possible."""
    is_given = np.isfinite(fitted.ours) & np.isfinite(fitted.theirs) & (fitted.theirs > IMPOSSIBLE)
    for row in fitted.by_row():
        yield row[is_given[row] & ~fitted.is_chosen[row]]


def _flips(fitted: Fitted) -> list[float]:
    """Return the exact gap, nats, of each pair of alternatives that is reported in the wrong order."""
    found = []
    for row in _alternatives(fitted):
        for a, b in combinations(row.tolist(), 2):
            ours, theirs = fitted.ours[a] - fitted.ours[b], fitted.theirs[a] - fitted.theirs[b]
            if ours * theirs < 0 and abs(ours) > TIE:
                found.append(abs(float(ours)))
    return found


def _kl(fitted: Fitted) -> float | None:
    """Return the mean KL divergence of theirs from ours over the alternatives, other tokens lumped; nats."""
    found = []
    for row in _alternatives(fitted):
        if len(row):
            _, first = np.unique(fitted.ids[row], return_index=True)
            ours, theirs = (
                measures.lumped(fitted.ours[row][first]),
                measures.lumped(fitted.theirs[row][first]),
            )
            # Probabilities that sum to more than 1 leave no mass for the other tokens.
            found.append(float(measures.kl_divergence(ours, np.maximum(theirs, math.log(1e-12)))))
    return float(np.mean(np.maximum(found, 0.0))) if found else None


# -- numbers that were not computed, and rounded ones --------------------------------------------------------


def mark_filled(fitted: Fitted, max_nats: float) -> None:
    """Mark numbers that were not computed: exact zeros, floors, and one value repeated."""
    off = fitted.errors > max_nats + fitted.allowance
    low = (fitted.theirs <= IMPOSSIBLE) | ~np.isfinite(fitted.theirs)
    filled = off & ((fitted.theirs == 0) | (low & (fitted.ours > UNLIKELY)))
    numbers, counts = np.unique(fitted.theirs[off], return_counts=True)
    for number, count in zip(numbers, counts, strict=True):
        same = fitted.theirs == number
        num_ours = len(np.unique(np.round(fitted.ours[same & off], 6)))
        if count >= 4 and num_ours >= 4 and count > off.sum() / 10 and fitted.allowance.max() == 0:
            filled |= same & off
    fitted.is_filled = filled


def rounding_of(numbers: Floats) -> str | None:
    """Return the precision of the numbers if coarser than float32: decimals or a narrower float."""
    values = np.unique(numbers[np.isfinite(numbers) & (numbers > IMPOSSIBLE) & (numbers != 0)])
    if len(values) < MIN_NUMBERS:
        return None
    for digits in range(5):
        if np.all(np.abs(values * 10**digits - np.round(values * 10**digits)) < 1e-6):
            return f"{digits} decimals"
    if np.all(values.astype(np.float32).view(np.uint32) & 0xFFFF == 0):
        return "bfloat16"
    return "float16" if np.all(values == values.astype(np.float16)) else None


def allowance_of(rounding: str, numbers: Floats) -> Floats:
    """Return the maximum change of each number by rounding or truncation, nats."""
    size = np.abs(np.where(np.isfinite(numbers) & (numbers > IMPOSSIBLE), numbers, 0.0))
    if rounding == "bfloat16":
        return np.asarray(size * 2.0**-7)
    if rounding == "float16":
        return np.asarray(size * 2.0**-10 + 1e-7)
    return np.full(len(numbers), 10.0 ** -int(rounding[0]))


# -- one cause of all errors ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cause:
    """An explanation of numbers that fit no requested distribution."""

    kind: str
    distribution: str
    title: str
    correction: str
    explained: Floats  # (N,) numbers that it predicts, NaN where it predicts none


def cause_of(fitted: Fitted, max_nats: float) -> Cause | None:
    """Return the first cause that explains the numbers far better than any requested distribution."""
    used = ~fitted.is_filled & np.isfinite(fitted.ours) & (fitted.theirs > IMPOSSIBLE)
    off = fitted.errors > max_nats + fitted.allowance
    if used.sum() < 3 or off[used].mean() < SYSTEMATIC or float(np.median(fitted.errors[used])) <= max_nats:
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
        title = "numbers are probabilities, not their logarithms ({count} of {of})"
        yield Cause("probabilities", "none", title, "take the natural logarithm", np.exp(fitted.ours))
    for base in (2, 10):
        title = (
            f"numbers are logarithms to the base {base}, not nats ({{count}} of {{of}}, up to {{worst}} nats)"
        )
        correction = f"divide logprobs by {1 / math.log(base):.4f}"
        yield Cause("log-base", "none", title, correction, fitted.raw / math.log(base))
    if fitted.places[0][0].where == "prompt":
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
        yield Cause(
            "temperature-unasked",
            "scaled",
            f"numbers are of a temperature of {temperature:.3g} that was not asked "
            "({count} of {of}, up to {worst} nats)",
            f"multiply logits by {temperature:.4g}: log_softmax({temperature:.4g} * logprobs) of whole rows",
            tempered,
        )
    added = np.full(len(fitted.theirs), np.nan)
    for row in rows:
        added[row] = np.median(fitted.theirs[row] - tempered[row])
    if rows and float(np.nanmedian(added)) > 0:
        after = "" if is_one else f", after a temperature of {temperature:.3g}"
        over = "the reported alternatives" if _is_whole(fitted, rows) else "a part of the vocabulary"
        yield Cause(
            "renormalised-unasked",
            "renormalised" if is_one else "scaled+renormalised",
            f"numbers are renormalised over {over}{after} ({{count}} of {{of}}, up to {{worst}} nats)",
            "add log_kept_mass, the logarithm of the mass of what was kept, to each row",
            tempered + added,
        )


def _shifts(fitted: Fitted) -> Iterator[Cause]:
    """Yield the causes that take a neighbouring token's number, or read a neighbouring row."""
    for by in (1, -1):
        for is_row in (False, True):
            moved = np.full(len(fitted.theirs), np.nan)
            for index, (group, place) in enumerate(fitted.places):
                t = place.t + by
                if 0 <= t < len(group.rows) and fitted.is_chosen[index]:
                    moved[index] = group.rows[t, fitted.ids[index] if is_row else group.ids[t]]
            side = "next" if by > 0 else "previous"
            what = "are read off the row of" if is_row else "are those of"
            title = f"prompt numbers {what} the {side} token ({{count}} of {{of}}, up to {{worst}} nats)"
            yield Cause("shifted", "none", title, f"take the row {-by:+d}", moved)


def _temperature_by_rows(fitted: Fitted, rows: Sequence[NDArray[np.int64]]) -> float | None:
    """Return the temperature from differences within rows: the median ratio, weighted by their size."""
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
    """Return the temperature that fits best where each row has one number."""
    indices = np.flatnonzero(used)
    indices = indices[:: max(len(indices) // MAX_SEARCHED, 1)][:MAX_SEARCHED]
    rows = np.array([fitted.places[index][0].rows[fitted.places[index][1].t] for index in indices])
    return fitted_temperature(rows, fitted.ids[indices][:, None], fitted.theirs[indices][:, None])[0]


def _is_whole(fitted: Fitted, rows: Sequence[NDArray[np.int64]]) -> bool:
    """Return whether the reported numbers of each row add up to 1."""
    for row in rows:
        _, first = np.unique(fitted.ids[row], return_index=True)
        if abs(float(np.exp(fitted.theirs[row][first]).sum()) - 1) > 1e-3:
            return False
    return True


def judge(fitted: Fitted, findings: Findings, max_nats: float) -> None:
    """Add the faults of one ask's numbers; if a cause explains them, adopt its distribution."""

    def add(kind: str, title: str, member: NDArray[np.bool_], correction: str | None = None) -> None:
        if member.any():
            findings.add(
                kind,
                title,
                evidence=fitted.evidence(member),
                worst=float(fitted.errors[member].max()),
                count=int(member.sum()),
                of=len(fitted.theirs),
                correction=correction,
            )

    mark_filled(fitted, max_nats)
    title = "{count} of {of} numbers are filled in, zeros or a floor, up to {worst} nats from the model's"
    add("filled-in", title, fitted.is_filled)
    off = (fitted.errors > max_nats + fitted.allowance) & ~fitted.is_filled
    cause = cause_of(fitted, max_nats)
    if cause is None:
        title = "{count} of {of} numbers are of no distribution that was asked, up to {worst} nats away"
        add("does-not-fit", title, off)
        return
    add(cause.kind, cause.title, off, cause.correction)
    if "scaled+" in cause.distribution:
        title = "numbers are of a temperature that was not asked, and renormalised ({count} of {of})"
        add("temperature-unasked", title, off)
    if cause.distribution != "none":
        fitted.ours = np.where(np.isfinite(cause.explained), cause.explained, fitted.ours)
    fitted.name = cause.distribution
