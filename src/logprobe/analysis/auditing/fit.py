"""Of which distribution numbers are, how far they are from it, and by what cause where they are of none.

Before it: rows of replies beside rows of our own (`Group`). After it: `Fitted`, `Errors` and findings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe.analysis import measures
from logprobe.analysis.auditing.distributions import fitted_temperature
from logprobe.analysis.auditing.reference import candidates
from logprobe.analysis.auditing.report import Errors, Evidence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.auditing.dialects import Ask
    from logprobe.analysis.auditing.findings import Findings
    from logprobe.analysis.auditing.report import Where
    from logprobe.analysis.auditing.tokens import Tokens
    from logprobe.analysis.measures import Floats

CAP: Final = 3.0  # nats: beyond it one number says no more against a distribution
IMPOSSIBLE: Final = -9000.0  # servers write -9999 for what cannot be
UNLIKELY: Final = -80.0  # nats: a float32 softmax ends about there
BETTER: Final = 5.0  # a cause is named where it explains numbers so many times better than what was asked
SYSTEMATIC: Final = 0.2  # the share of numbers that are off, from which on a cause of all is looked for
SAME_FACTOR: Final = 0.01  # relative difference of two factors that are one
FEW: Final = 20  # different numbers that show a rounding
TIE: Final = 1e-6  # nats
MAX_SEARCHED: Final = 16  # rows by which an unknown temperature is looked for


@dataclass(slots=True)
class Place:
    """One row of a reply, with the ids that its entries may mean."""

    position: int
    t: int  # the row of ours
    entries: list[tuple[list[int], float | None, bool]]  # ids, their number, whether the chosen token
    is_map: bool = False  # by texts: two tokens of one text are one entry


@dataclass(slots=True)
class Group:
    """The rows of one reply beside ours."""

    ask: Ask
    where: Where
    rows: NDArray[np.float32]  # (T, V) raw, nats
    context: tuple[int, ...]  # what stands before the first of them
    ids: tuple[int, ...]  # (T,) the tokens that stand there
    places: list[Place]

    @property
    def completion(self) -> tuple[int, ...]:
        """What penalties count: before row t the first t."""
        return self.ids if self.where == "completion" else ()


@dataclass(slots=True)
class Fitted:
    """All numbers of one ask beside the distribution that fits them best; (N,) arrays."""

    name: str
    tokens: Tokens
    places: list[tuple[Group, Place]]
    theirs: Floats  # nats, -inf where a server says impossible
    ours: Floats
    raw: Floats
    ids: NDArray[np.int64]
    is_chosen: NDArray[np.bool_]
    allowance: Floats  # nats that a rounding explains
    is_filled: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))

    @property
    def ask(self) -> Ask:
        """What was asked; the same of all groups but for the prompt."""
        return self.places[0][0].ask

    @property
    def label(self) -> str:
        """What was asked, and of what the rows are."""
        where = self.places[0][0].where
        return f"{self.ask.label} ({where} rows)"

    @property
    def errors(self) -> Floats:
        """How far each is from the distribution, nats, at most `CAP` where one of both is impossible."""
        return distance(self.theirs, self.ours)

    def evidence(self, where: NDArray[np.bool_], note: str = "") -> list[Evidence]:
        """The worst places among some."""
        chosen = np.flatnonzero(where)
        order = chosen[np.argsort(-self.errors[chosen], kind="stable")][:5]
        return [self.evidence_at(int(index), note) for index in order]

    def evidence_at(self, index: int, note: str) -> Evidence:
        """One place."""
        group, place = self.places[index]
        return Evidence(
            ask=group.ask.label,
            prompt=group.ask.shown,
            position=place.position,
            where=group.where,
            token=self.tokens.show(int(self.ids[index])),
            theirs=finite(self.theirs[index]),
            ours=finite(self.ours[index]),
            note=note,
        )


def finite(value: float) -> float | None:
    """A number as JSON has it."""
    return float(value) if math.isfinite(value) else None


def distance(theirs: Floats, ours: Floats) -> Floats:
    """|theirs - ours|; 0 where both are impossible, at least `CAP` where one of the two is."""
    is_low = (theirs <= IMPOSSIBLE) | ~np.isfinite(theirs)
    never = ~np.isfinite(ours)
    with np.errstate(invalid="ignore"):
        plain = np.abs(theirs - ours)
    both = np.where(never | (ours < UNLIKELY), 0.0, np.maximum(CAP, np.abs(np.where(never, 0, ours))))
    return np.where(is_low, both, np.where(never, CAP, plain))


# -- the distribution that fits best -------------------------------------------------------------------------


def fit(groups: Sequence[Group], tokens: Tokens) -> Fitted | None:
    """The distribution that the numbers of one ask come nearest, the simplest of those that fit equally."""
    theirs: list[float] = []
    options: list[list[int]] = []
    is_chosen: list[bool] = []
    places: list[tuple[Group, Place]] = []
    values: dict[tuple[int, str], list[Floats]] = {}
    chosen_ids: dict[tuple[int, str], list[NDArray[np.int64]]] = {}
    for group in groups:
        entries = [(place, *entry) for place in group.places for entry in place.entries if entry[0]]
        if not entries:
            continue
        numbers = np.array([-np.inf if number is None else number for _, _, number, _ in entries])
        for index, (name, rows) in enumerate(candidates(group.rows, group.ask.params, group.completion)):
            ours, ids = _looked_up(rows, entries, numbers)
            values.setdefault((index, name), []).append(ours)
            chosen_ids.setdefault((index, name), []).append(ids)
        theirs += numbers.tolist()
        options += [ids for _, ids, _, _ in entries]
        is_chosen += [chosen for *_, chosen in entries]
        places += [(group, place) for place, *_ in entries]
    if not places:
        return None
    reported = np.array(theirs)
    whole = {key: np.concatenate(parts) for key, parts in values.items()}
    scores = {key: float(np.minimum(distance(reported, ours), CAP).mean()) for key, ours in whole.items()}
    least = min(scores.values())
    best = next(key for key, score in scores.items() if score <= least + TIE)
    return Fitted(
        name=best[1],
        tokens=tokens,
        places=places,
        theirs=reported,
        ours=whole[best],
        raw=whole[(0, "raw")],
        ids=np.concatenate(chosen_ids[best]),
        is_chosen=np.array(is_chosen),
        allowance=np.zeros(len(reported)),
        is_filled=np.zeros(len(reported), np.bool_),
    )


def _looked_up(
    rows: Floats, entries: Sequence[tuple[Place, list[int], float | None, bool]], numbers: Floats
) -> tuple[Floats, NDArray[np.int64]]:
    """What rows give to entries; of several ids that one may mean, the one that fits."""
    ids = np.array([options[0] for _, options, _, _ in entries], np.int64)
    places = np.array([place.t for place, *_ in entries])
    values = rows[places, ids]
    for index, (place, options, _, _) in enumerate(entries):
        if len(options) > 1:
            several = rows[place.t, options]
            nearest = int(np.argmin(distance(np.full(len(options), numbers[index]), several)))
            ids[index], values[index] = options[nearest], several[nearest]
    return values, ids


def errors_of(fitted: Fitted) -> list[Errors]:
    """The errors of chosen tokens and of alternatives, apart."""
    found = []
    for of, member in (("chosen", fitted.is_chosen), ("alternatives", ~fitted.is_chosen)):
        if not member.any():
            continue
        errors = fitted.errors[member]
        is_listed = of == "alternatives"
        flips = _flips(fitted) if is_listed else []
        found.append(
            Errors(
                ask=fitted.label,
                of=of,  # type: ignore[arg-type]
                distribution=fitted.name,
                count=int(member.sum()),
                worst=float(errors.max()),
                mean=float(errors.mean()),
                p99=float(np.quantile(errors, 0.99)),
                kl=_kl(fitted) if is_listed else None,
                rank_flips=len(flips),
                widest_flip=max(flips, default=None),
            )
        )
    return found


def _rows_of(fitted: Fitted) -> Iterator[NDArray[np.int64]]:
    """The indices of the alternatives of each place."""
    for listed in _all_rows(fitted):
        others = listed[~fitted.is_chosen[listed]]
        if len(others):
            yield others


def _flips(fitted: Fitted) -> list[float]:
    """How far apart each two alternatives are that stand in another order than ours, nats."""
    found = []
    for listed in _rows_of(fitted):
        possible = listed[np.isfinite(fitted.ours[listed]) & np.isfinite(fitted.theirs[listed])]
        for a, b in combinations(possible.tolist(), 2):
            mine, other = fitted.ours[a] - fitted.ours[b], fitted.theirs[a] - fitted.theirs[b]
            if mine * other < 0 and abs(mine) > TIE:
                found.append(abs(float(mine)))
    return found


def _kl(fitted: Fitted) -> float | None:
    """KL divergence of theirs from ours over the alternatives, all other tokens as one; mean, nats."""
    found = []
    for listed in _rows_of(fitted):
        _, first = np.unique(fitted.ids[listed], return_index=True)
        ours, theirs = fitted.ours[listed][first], fitted.theirs[listed][first]
        is_given = np.isfinite(ours) & np.isfinite(theirs) & (theirs > IMPOSSIBLE)
        if is_given.any():
            rows = measures.lumped(ours[is_given]), measures.lumped(theirs[is_given])
            # Numbers that add up to more than 1 leave nothing to the others.
            found.append(float(measures.kl_divergence(rows[0], np.maximum(rows[1], math.log(1e-12)))))
    return float(np.mean(np.maximum(found, 0.0))) if found else None


# -- numbers that were not computed, and rounded ones --------------------------------------------------------


def mark_filled(fitted: Fitted, max_nats: float) -> None:
    """Mark numbers that no computation gives: exact zeros, floors, one value over and over."""
    off = fitted.errors > max_nats + fitted.allowance
    low = (fitted.theirs <= IMPOSSIBLE) | ~np.isfinite(fitted.theirs)
    filled = off & ((fitted.theirs == 0) | (low & (fitted.ours > UNLIKELY)))
    numbers, counts = np.unique(fitted.theirs[off], return_counts=True)
    for number, count in zip(numbers, counts, strict=True):
        same = fitted.theirs == number
        different = len(np.unique(np.round(fitted.ours[same & off], 6)))
        if count >= 4 and different >= 4 and count > off.sum() / 10 and fitted.allowance.max() == 0:
            filled |= same & off
    fitted.is_filled = filled


def rounding_of(numbers: Floats) -> str | None:
    """The grid that all numbers lie on, where it is coarser than float32's: decimals or a narrow float."""
    given = np.unique(numbers[np.isfinite(numbers) & (numbers > IMPOSSIBLE) & (numbers != 0)])
    if len(given) < FEW:
        return None
    for digits in (0, 1, 2, 3, 4):
        if np.all(np.abs(given * 10**digits - np.round(given * 10**digits)) < 1e-6):
            return f"{digits} decimals"
    if np.all(given.astype(np.float32).view(np.uint32) & 0xFFFF == 0):
        return "bfloat16"
    return "float16" if np.all(given == given.astype(np.float16)) else None


def allowance_of(rounding: str, numbers: Floats) -> Floats:
    """How far rounding to a grid, or cutting to it, may move each number, nats."""
    size = np.abs(np.where(np.isfinite(numbers) & (numbers > IMPOSSIBLE), numbers, 0.0))
    if rounding == "bfloat16":
        return np.asarray(size * 2.0**-7)
    if rounding == "float16":
        return np.asarray(size * 2.0**-10 + 1e-7)
    return np.full(len(numbers), 10.0 ** -int(rounding[0]))


# -- causes of all errors ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cause:
    """What explains numbers that no distribution does which was asked."""

    kind: str
    distribution: str
    title: str
    correction: str | None
    explained: Floats  # (N,) the numbers that it gives


def cause_of(fitted: Fitted, max_nats: float) -> Cause | None:
    """A cause that explains all numbers of an ask far better than the best distribution that was asked."""
    used = ~fitted.is_filled & np.isfinite(fitted.ours) & (fitted.theirs > IMPOSSIBLE)
    off = fitted.errors > max_nats + fitted.allowance
    if used.sum() < 3 or off[used].mean() < SYSTEMATIC:
        return None
    for find in (_as_probabilities, _shifted, _scaled_rows, _scaled_chosen):
        cause = find(fitted, used)
        if cause is not None and _explains(cause.explained, fitted, used, max_nats):
            return cause
    return None


def _explains(explained: Floats, fitted: Fitted, used: NDArray[np.bool_], max_nats: float) -> bool:
    left = np.abs(explained - fitted.theirs)[used]
    allowed = max(float(np.median(fitted.errors[used])) / BETTER, 1e-9)
    near = float(np.median(left - fitted.allowance[used]))
    return near <= allowed and float(np.median(fitted.errors[used])) > max_nats


def _as_probabilities(fitted: Fitted, used: NDArray[np.bool_]) -> Cause | None:
    numbers = fitted.theirs[used]
    if not (np.all((numbers >= 0) & (numbers <= 1)) and np.any(numbers > 0)):
        return None
    return Cause(
        "probabilities",
        "none",
        "numbers are probabilities, not their logarithms ({count} of {of})",
        "take the natural logarithm",
        np.exp(fitted.ours),
    )


def _shifted(fitted: Fitted, used: NDArray[np.bool_]) -> Cause | None:
    """Numbers of the tokens of a prompt that stand at their neighbour, or are of the neighbour's row."""
    if fitted.places[0][0].where != "prompt":
        return None
    best, least = None, math.inf
    for by in (1, -1):
        for is_row in (False, True):
            moved = np.full(len(fitted.theirs), np.nan)
            for index, (group, place) in enumerate(fitted.places):
                t = place.t + by
                if 0 <= t < len(group.rows) and fitted.is_chosen[index]:
                    moved[index] = group.rows[t, fitted.ids[index] if is_row else group.ids[t]]
            given = used & np.isfinite(moved)
            if given.sum() < 3:
                continue
            left = float(np.median(np.abs(moved - fitted.theirs)[given]))
            if left < least:
                best, least = (by, is_row, moved), left
    if best is None or least * BETTER > float(np.median(fitted.errors[used & fitted.is_chosen])):
        return None
    by, is_row, moved = best
    side = "next" if by > 0 else "previous"
    what = "are read off the row of" if is_row else "are those of"
    title = f"prompt numbers {what} the {side} token ({{count}} of {{of}}, up to {{worst}} nats)"
    return Cause(
        "shifted", "none", title, f"take the row {-by:+d}", np.where(np.isnan(moved), fitted.theirs, moved)
    )


def _scaled_rows(fitted: Fitted, used: NDArray[np.bool_]) -> Cause | None:
    """A factor of whole rows, and what was added to each, from rows with several numbers."""
    rows = [listed[used[listed]] for listed in _all_rows(fitted)]
    rows = [listed for listed in rows if len(np.unique(fitted.ids[listed])) >= 3]
    if not rows:
        return None
    x = np.concatenate([fitted.raw[one] - fitted.raw[one].mean() for one in rows])
    y = np.concatenate([fitted.theirs[one] - fitted.theirs[one].mean() for one in rows])
    factor = _slope(x, y)
    if not factor > 0.01:
        return None
    added = np.zeros(len(fitted.theirs))
    norms = np.zeros(len(fitted.theirs))
    within = np.zeros(len(fitted.theirs), np.bool_)
    for one in rows:
        group, place = fitted.places[int(one[0])]
        added[one] = np.median(fitted.theirs[one] - factor * fitted.raw[one])
        norms[one] = -measures.logsumexp(factor * group.rows[place.t].astype(np.float64))
        within[one] = True
    # Of nearly all numbers: a constant a row is near the middle ones, whatever they are.
    noise = float(np.quantile(np.abs(fitted.theirs - factor * fitted.raw - added)[within], 0.9))
    enough = max(BETTER * noise, 2e-4, float(fitted.allowance.max()))
    base = _base_of(factor)
    if base is not None and float(np.median(np.abs(added[within]))) <= enough:
        return _logarithms(fitted, factor, base)
    is_one = abs(factor - 1) < SAME_FACTOR
    if float(np.median(np.abs(added - norms)[within])) <= enough:
        if is_one:
            return None  # the model's own rows
        return _tempered(fitted, 1 / factor)
    if float(np.median(added[within])) < 0 and is_one:
        return None
    explained = np.where(within, factor * fitted.raw + added, fitted.theirs)
    masses = [float(np.exp(fitted.theirs[one]).sum()) for one in _reported_rows(fitted, rows)]
    is_reported = bool(np.all(np.abs(np.array(masses) - 1) < 1e-3))
    over = "the reported alternatives" if is_reported else "a part of the vocabulary"
    after = "" if is_one else f", after a temperature of {1 / factor:.3g}"
    return Cause(
        "renormalised-unasked",
        "renormalised" if is_one else "scaled+renormalised",
        f"numbers are renormalised over {over}{after} ({{count}} of {{of}}, up to {{worst}} nats)",
        "add log_kept_mass, the logarithm of the mass of what was kept, to each row",
        explained,
    )


def _reported_rows(fitted: Fitted, rows: Sequence[NDArray[np.int64]]) -> Iterator[NDArray[np.int64]]:
    """Each token of a row once."""
    for one in rows:
        _, first = np.unique(fitted.ids[one], return_index=True)
        yield one[first]


def _all_rows(fitted: Fitted) -> Iterator[NDArray[np.int64]]:
    start = 0
    for index in range(1, len(fitted.places) + 1):
        if index == len(fitted.places) or fitted.places[index][1] is not fitted.places[start][1]:
            yield np.arange(start, index)
            start = index


def _slope(x: Floats, y: Floats) -> float:
    """The factor from x to y, the median of ratios weighted by |x|: outliers do not move it."""
    weights = np.abs(x)
    given = weights > 1e-6
    if not given.any():
        return 0.0
    ratios, weights = (y[given] / x[given]), weights[given]
    order = np.argsort(ratios)
    sums = np.cumsum(weights[order])
    return float(ratios[order][np.searchsorted(sums, sums[-1] / 2)])


def _scaled_chosen(fitted: Fitted, used: NDArray[np.bool_]) -> Cause | None:
    """A temperature or base from numbers alone, where rows have one each."""
    ratios = (fitted.theirs / np.where(fitted.raw == 0, np.nan, fitted.raw))[used & (fitted.raw < -0.05)]
    if len(ratios) >= 3:
        factor = float(np.nanmedian(ratios))
        base = _base_of(factor)
        if base is not None and float(np.nanmedian(np.abs(ratios - factor))) < SAME_FACTOR:
            return _logarithms(fitted, factor, base)
    rows = np.array([group.rows[place.t] for group, place in fitted.places[:MAX_SEARCHED]])
    given = slice(0, len(rows))
    temperature, _ = fitted_temperature(
        rows, fitted.ids[given][:, None], np.where(used, fitted.theirs, -np.inf)[given][:, None]
    )
    return None if abs(temperature - 1) < SAME_FACTOR else _tempered(fitted, temperature)


def _tempered(fitted: Fitted, temperature: float) -> Cause:
    rows = {id(place): group.rows[place.t] for group, place in fitted.places}
    norms = {
        key: float(measures.logsumexp(row.astype(np.float64) / temperature)) for key, row in rows.items()
    }
    explained = fitted.raw / temperature - np.array([norms[id(place)] for _, place in fitted.places])
    return Cause(
        "temperature-unasked",
        "scaled",
        f"numbers are of a temperature of {temperature:.3g} that was not asked "
        "({count} of {of}, up to {worst} nats)",
        f"multiply logits by {temperature:.4g}: log_softmax({temperature:.4g} * logprobs) of whole rows",
        explained,
    )


def _base_of(factor: float) -> str | None:
    for base in (2, 10):
        if abs(factor * math.log(base) - 1) < SAME_FACTOR:
            return str(base)
    return None


def _logarithms(fitted: Fitted, factor: float, base: str) -> Cause:
    return Cause(
        "log-base",
        "none",
        f"numbers are logarithms to the base {base}, not nats ({{count}} of {{of}}, up to {{worst}} nats)",
        f"divide logprobs by {1 / math.log(int(base)):.4f}",
        factor * fitted.raw,
    )


def judge(fitted: Fitted, findings: Findings, max_nats: float) -> None:
    """Add what the numbers of one ask show; where a cause explains them, they are of its distribution."""
    mark_filled(fitted, max_nats)
    if fitted.is_filled.any():
        findings.add(
            "filled-in",
            "{count} of {of} numbers are filled in, zeros or a floor, up to {worst} nats from the model's",
            evidence=fitted.evidence(fitted.is_filled),
            worst=float(fitted.errors[fitted.is_filled].max()),
            count=int(fitted.is_filled.sum()),
            of=len(fitted.theirs),
        )
    off = (fitted.errors > max_nats + fitted.allowance) & ~fitted.is_filled
    cause = cause_of(fitted, max_nats)
    if cause is not None:
        findings.add(
            cause.kind,
            cause.title,
            evidence=fitted.evidence(off),
            worst=float(fitted.errors[off].max()),
            count=int(off.sum()),
            of=len(fitted.theirs),
            correction=cause.correction,
        )
        if "scaled+" in cause.distribution:
            findings.add(
                "temperature-unasked",
                "numbers are of a temperature that was not asked, and renormalised ({count} of {of})",
                evidence=fitted.evidence(off),
                worst=float(fitted.errors[off].max()),
                count=int(off.sum()),
                of=len(fitted.theirs),
            )
        if cause.distribution != "none":
            fitted.ours = np.where(np.isfinite(cause.explained), cause.explained, fitted.ours)
        fitted.name = cause.distribution
        return
    if off.any():
        findings.add(
            "does-not-fit",
            "{count} of {of} numbers are of no distribution that was asked, up to {worst} nats away",
            evidence=fitted.evidence(off),
            worst=float(fitted.errors[off].max()),
            count=int(off.sum()),
            of=len(fitted.theirs),
        )
