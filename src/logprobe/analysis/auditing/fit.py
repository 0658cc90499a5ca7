"""Find the distribution that reported logprobs fit best, measure errors, and find the cause if none fits.

The replies (`Group`s) to requests that differ only in the prompt become one `Fitted`, which has each reported
logprob and its exact value in the best-fitting distribution. `judge` and `check_alternatives` add findings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.analysis.auditing.report import Errors, Evidence
from logprobe.analysis.distributions import candidates, fitted_temperature, tempered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.auditing.forms import Ask
    from logprobe.analysis.auditing.report import Findings
    from logprobe.analysis.auditing.rows import Group
    from logprobe.analysis.auditing.tokens import Tokens
    from logprobe.analysis.measures import Floats

CAP: Final = 3.0  # nats; maximum error of one logprob in the comparison of distributions
IMPOSSIBLE: Final = -9000.0  # nats; servers write -9999 for a probability of zero
UNLIKELY: Final = -80.0  # nats; a float32 softmax underflows below about this value
BETTER: Final = 5.0  # a cause must explain logprobs this many times better than the requested distribution
SYSTEMATIC: Final = 0.2  # share of wrong logprobs above which a common cause is searched for
TAIL: Final = 0.9  # second quantile to check: adding a constant to each row can fit the median of all rows
SAME_FACTOR: Final = 0.01  # two factors with a smaller relative difference are equal
MIN_NUMBERS: Final = 20  # number of different logprobs needed to detect rounding
TIE: Final = 1e-6  # nats; two logprobs with a smaller difference are equal
MAX_SEARCHED: Final = 16  # number of rows used to search for an unknown temperature


@dataclass(slots=True)
class Fitted:
    """N logprobs reported for requests that differ only in the prompt, and the best-fitting distribution.

    All arrays are (N,), and logprobs are in nats.
    """

    name: str
    tokens: Tokens
    groups: Sequence[Group]
    owner: NDArray[np.int64]  # index of each logprob's group
    t: NDArray[np.int64]  # index of its row in the group
    theirs: Floats  # reported by the server; -inf if reported as impossible
    ours: Floats  # exact value in the best-fitting distribution
    raw: Floats  # exact value in the model's raw distribution
    ids: NDArray[np.int64]
    is_chosen: NDArray[np.bool_]  # False for an alternative
    rounding: str | None  # precision to which the server's logprobs are rounded, if coarser than float32

    @property
    def ask(self) -> Ask:
        """The request; all groups have the same request apart from the prompt."""
        return self.groups[0].ask

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
        """Return the indices of each row's logprobs, one array per row."""
        is_new = (np.diff(self.owner) != 0) | (np.diff(self.t) != 0)
        return np.split(np.arange(len(self.t)), np.flatnonzero(is_new) + 1)

    def evidence(self, member: NDArray[np.bool_]) -> list[Evidence]:
        """Return evidence for the five largest errors among the logprobs in the mask `member`."""
        chosen = np.flatnonzero(member)
        worst = chosen[np.argsort(-self.errors[chosen], kind="stable")][:5]
        return [self.evidence_at(index) for index in worst]

    def evidence_at(self, index: int | np.integer[Any], note: str = "") -> Evidence:
        """Return the logprob at `index` as evidence."""
        group: Group = self.groups[self.owner[index]]
        return group.ask.evidence(
            group.first + int(self.t[index]),
            token=self.tokens.show(int(self.ids[index])),
            theirs=finite(self.theirs[index]),
            ours=finite(self.ours[index]),
            note=note,
        )


def finite(value: float) -> float | None:
    """Return `value` as a float, or None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def is_impossible(theirs: Floats) -> NDArray[np.bool_]:
    """Return a mask of the logprobs that mean an impossible token: not finite, or at most `IMPOSSIBLE`."""
    return np.asarray((theirs <= IMPOSSIBLE) | ~np.isfinite(theirs))


def distance(theirs: Floats, ours: Floats) -> Floats:
    """Return |theirs - ours| in nats; 0 if both are impossible, at least `CAP` if only one is."""
    never = ~np.isfinite(ours)
    with np.errstate(invalid="ignore"):
        plain = np.abs(theirs - ours)
    both = np.where(never | (ours < UNLIKELY), 0.0, np.maximum(CAP, np.abs(np.where(never, 0, ours))))
    return np.where(is_impossible(theirs), both, np.where(never, CAP, plain))


def fit(groups: Sequence[Group], tokens: Tokens) -> Fitted | None:
    """Find the distribution that the logprobs in `groups` fit best, the simplest one if several fit equally.

    Returns None if there are no logprobs.
    """
    if not groups:
        return None
    theirs = np.concatenate([group.theirs for group in groups])
    if not len(theirs):
        return None
    named = [candidates(group.rows, group.ask.params, group.counted) for group in groups]
    fits = []
    for tables in zip(*named, strict=True):
        ours = np.concatenate(
            [rows[group.t, group.token_ids] for group, (_, rows) in zip(groups, tables, strict=True)]
        )
        score = float(np.minimum(distance(theirs, ours), CAP).mean())
        fits.append((score, tables[0][0], ours))
    least = min(score for score, *_ in fits)
    _, name, ours = next(one for one in fits if one[0] <= least + TIE)
    return Fitted(
        name=name,
        tokens=tokens,
        groups=groups,
        owner=np.repeat(np.arange(len(groups)), [len(group.t) for group in groups]),
        t=np.concatenate([group.t for group in groups]),
        theirs=theirs,
        ours=ours,
        raw=fits[0][2],
        ids=np.concatenate([group.token_ids for group in groups]),
        is_chosen=np.concatenate([group.is_chosen for group in groups]),
        rounding=rounding_of(theirs),
    )


def errors_of(fitted: Fitted) -> Errors:
    """Summarize the errors."""
    errors = fitted.errors
    return Errors(
        ask=fitted.label,
        distribution=fitted.name,
        count=len(errors),
        worst=float(errors.max()),
        mean=float(errors.mean()),
    )


# -- numbers that were not computed, and rounded ones --------------------------------------------------------


def filled_in(fitted: Fitted, max_nats: float) -> NDArray[np.bool_]:
    """Return a mask of the wrong logprobs that are placeholders: zeros, floors, or one repeated value."""
    off = fitted.is_off(max_nats)
    is_floor = is_impossible(fitted.theirs) & (fitted.ours > UNLIKELY)
    filled = off & ((fitted.theirs == 0) | is_floor)
    numbers, counts = np.unique(fitted.theirs[off], return_counts=True)
    for number, count in zip(numbers, counts, strict=True):
        same = off & (fitted.theirs == number)
        num_ours = len(np.unique(np.round(fitted.ours[same], 6)))
        if count >= 4 and num_ours >= 4 and count > off.sum() / 10 and fitted.rounding is None:
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
    """Return the most that rounding or truncation may have changed each logprob, in nats."""
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
        for by in (1, -1):
            for is_row in (False, True):
                moved = _of_neighbours(fitted, by, is_row=is_row)
                yield Cause("shifted", "none", f"for each token, take the row at offset {-by:+d}", moved)
    temperature = _temperature(fitted, used)
    if abs(temperature - 1) > SAME_FACTOR:
        factor = f"{temperature:.3g}"
        correction = f"multiply logits by {factor}: log_softmax({factor} * logprobs) of whole rows"
        explained = _gathered(
            fitted, lambda group: tempered(group.rows, temperature)[group.t, group.token_ids]
        )
        yield Cause("temperature-unasked", "scaled", correction, explained, factor)
    added = np.full(len(fitted.theirs), np.nan)
    for row in fitted.by_row():
        member = row[used[row]]
        if len(np.unique(fitted.ids[member])) >= 3:
            added[member] = np.median(fitted.theirs[member] - fitted.raw[member])
    if np.isfinite(added).any() and float(np.nanmedian(added)) > 0:
        correction = "add log_kept_mass, the log of the kept tokens' total probability, to each row"
        yield Cause("renormalised-unasked", "renormalised", correction, fitted.raw + added)


def _gathered(fitted: Fitted, values: Callable[[Group], Floats]) -> Floats:
    """Concatenate the values, (N,), that a function returns for each group."""
    return np.concatenate([values(group) for group in fitted.groups])


def _of_neighbours(fitted: Fitted, by: int, *, is_row: bool) -> Floats:
    """Return the exact logprob of the chosen token `by` positions later, (N,) nats; NaN for alternatives.

    If `is_row` is True, return the logprob of the token itself in the row at that position.
    """

    def moved(group: Group) -> Floats:
        t = group.t + by
        is_within = group.is_chosen & (t >= 0) & (t < len(group.rows))
        t = np.where(is_within, t, 0)
        ids = group.token_ids if is_row else np.asarray(group.ids)[t]
        return np.where(is_within, group.rows[t, ids], np.nan)

    return _gathered(fitted, moved)


def _temperature(fitted: Fitted, used: NDArray[np.bool_]) -> float:
    """Return the temperature at which a sample of the raw rows fits the reported logprobs best."""
    members = [member for row in fitted.by_row() if len(member := row[used[row]])]
    members = members[:: max(len(members) // MAX_SEARCHED, 1)][:MAX_SEARCHED]
    shape = len(members), max(map(len, members))
    ids, numbers = np.zeros(shape, np.int64), np.full(shape, -np.inf)
    for at, member in enumerate(members):
        ids[at, : len(member)], numbers[at, : len(member)] = fitted.ids[member], fitted.theirs[member]
    rows = np.array([fitted.groups[fitted.owner[one[0]]].rows[fitted.t[one[0]]] for one in members])
    return fitted_temperature(rows, ids, numbers)[0]


# -- faults --------------------------------------------------------------------------------------------------


def judge(fitted: Fitted, findings: Findings, max_nats: float) -> None:
    """Add faults for wrong logprobs in `fitted`; if a cause explains them, change `fitted` accordingly."""

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
        detail = "{count} of {of} numbers fit no distribution that was requested, off by up to {worst} nats"
        add("does-not-fit", off, detail)
        return
    add(cause.kind, off, cause.detail, cause.correction)
    if cause.distribution != "none":
        fitted.ours = np.where(np.isfinite(cause.explained), cause.explained, fitted.ours)
    fitted.name = cause.distribution


def check_alternatives(fitted: Fitted, findings: Findings, max_nats: float) -> None:
    """Check that the alternatives of each row are the most likely tokens.

    Rows after truncation, masks or penalties, and rows with unidentified alternatives, are not checked.
    """
    if {*fitted.name.split("+")} & {"kept", "renormalised", "masked", "penalised", "none"}:
        return
    if float(np.median(fitted.errors - fitted.allowance)) > max_nats:  # probably another model's rows
        return
    for indices in fitted.by_row():
        group, t = fitted.groups[fitted.owner[indices[0]]], int(fitted.t[indices[0]])
        listed = {*fitted.ids[indices[~fitted.is_chosen[indices]]].tolist()}
        if not listed or group.ask.num_top < 2 or t in group.unknown:
            continue
        row = group.rows[t]
        best = np.argsort(-row, kind="stable")[: group.ask.num_top].tolist()
        chosen = group.ids[t]
        lowest = min((row[one] for one in listed if one != chosen), default=row[chosen])
        left_out = [one for one in best if one not in listed and row[one] > lowest + 2 * max_nats]
        if left_out:
            note = f"{fitted.tokens.show(left_out[0])!r} is left out"
            findings.add("alternatives-wrong", evidence=[fitted.evidence_at(indices[0], note)])
