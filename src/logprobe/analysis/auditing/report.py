"""Report of an audit: findings with evidence, measurements, and log-probabilities for a later audit.

The report is plain, JSON-serializable data. Nothing in this module sends requests or runs a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from logprobe.errors import InputError
from logprobe.records.forms.versions import check_version

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

VERSION: Final = 2
MAX_EVIDENCE: Final = 5
PLOT_FLOOR_NATS: Final = 1e-8  # errors of 0 are drawn here on the logarithmic axis
MAX_TEXT: Final = 80  # maximum number of characters of a prompt, a token or a server's message

Where: TypeAlias = Literal["prompt", "completion"]

NUMBER_KINDS: Final[dict[str, str]] = {
    "temperature-unasked": "numbers are at a temperature of {detail} that was not requested ({extent})",
    "renormalised-unasked": "numbers are renormalized over a part of the vocabulary{detail} ({extent})",
    "log-base": "numbers are logarithms to the base {detail}, not nats ({extent})",
    "probabilities": "numbers are probabilities, not their logarithms ({extent})",
    "rounded": "numbers are rounded to {detail}, up to {worst} nats",
    "shifted": "rows are those of the neighboring token ({count} of {of})",
    "rows-missing": "{count} of {of} tokens have no row",
    "rows-repeated": "{count} of {of} tokens have two rows",
    "filled-in": "{count} of {of} numbers are placeholders (zeros or a floor), off by up to {worst} nats",
    "alternatives-wrong": "{count} rows leave out a token that is more likely than those listed",
    "unsteady-repeated": "numbers change when a request is repeated alone, by up to {worst} nats",
    "unsteady-beside-others": "numbers change while other requests run, by up to {worst} nats",
    "unsteady-cached": "a prompt's numbers change once it is cached, by up to {worst} nats",
    "unsteady-order": "numbers depend on the prompt that was sent before, by up to {worst} nats",
    "unsteady-after-generation": "a prompt's numbers change after a generation, by up to {worst} nats",
    "wrong-at-length": "prompts of {count} lengths have wrong numbers, off by up to {worst} nats",
    "prefill-decode": "generated tokens are right; scored as a prompt, they are off by up to {worst} nats",
    "stream-differs": "the numbers of a stream and of a whole reply differ by up to {worst} nats",
    "bos": "prompts do not begin as the tokenizer says: {detail} ({count} replies)",
    "template": "chats do not have the layout of the model's template{detail} ({count} replies)",
    "lora-prompt": "prompt rows are those of the model without its LoRA weights, off by up to {worst} nats",
    "lora-ignored": "the LoRA weights have no effect: {count} replies are the base model's",
    "stale-weights": "{count} of {of} numbers are those of the earlier weights, off by up to {worst} nats",
    "changed-unasked": "{count} of {of} numbers changed by up to {worst} nats, but the weights did not",
    "does-not-fit": "{detail}",
}
"""Title of each kind of finding about log-probabilities: wrong, missing, or computed for another prompt."""

CONFORMANCE_KINDS: Final[dict[str, str]] = {
    "ids-repeated": "{count} rows list a token twice among the alternatives",
    "alternatives-cut": "{count} rows have fewer alternatives than requested ({detail})",
    "bytes-wrong": "{count} tokens have the bytes of another token",
    "text-wrong": "{count} tokens have the text of another token",
    "ignored": "fields are accepted with 200 and have no effect: {detail}",
}
"""Title of each kind of fault in the API, which does not affect log-probabilities."""

NOTE_KINDS: Final[dict[str, str]] = {
    "unidentified": "{count} entries are of tokens that cannot be identified by their id, bytes or text",
    "form": "{detail}",
    "left-out": "{detail}",
}
"""Title of each kind of note: what the server does not offer, or what could not be checked."""

KINDS: Final[dict[str, str]] = NUMBER_KINDS | CONFORMANCE_KINDS | NOTE_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One occurrence of a finding.

    `theirs` and `ours` are the server's and the exact log-probability of a token, in nats; None if missing or
    impossible (-inf). `ask` describes the request.
    """

    ask: str
    prompt: str
    position: int | None
    where: Where
    token: str | None = None
    theirs: float | None = None
    ours: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault or note about a server, found in `count` of the `of` rows, requests or tokens checked."""

    kind: str
    severity: Literal["fault", "note"]
    title: str
    count: int
    of: int
    worst_nats: float | None = None
    evidence: tuple[Evidence, ...] = ()
    correction: str | None = None


class Findings:
    """Collects findings: one fault per kind, with the worst evidence, and one note per kind and detail."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str | None], Finding] = {}

    def add(
        self,
        kind: str,
        detail: str = "",
        *,
        is_note: bool = False,
        evidence: Iterable[Evidence] = (),
        worst: float | None = None,
        count: int = 1,
        of: int = 1,
        correction: str | None = None,
    ) -> None:
        """Add a finding, or merge it with an earlier one of the same kind (and detail, for a note).

        A merged finding has the sum of the counts, the worst evidence, and the earlier title and correction.
        """
        key = kind, detail if is_note else None
        title = KINDS[kind].replace("{detail}", detail)
        new = Finding(kind=kind, severity="note" if is_note else "fault", title=title, count=0, of=0)
        old = self._kept.get(key, new)
        sizes = [size for size in (old.worst_nats, worst) if size is not None]
        worst_first = sorted([*old.evidence, *evidence], key=_distance, reverse=True)
        self._kept[key] = replace(
            old,
            count=old.count + count,
            of=old.of + of,
            worst_nats=max(sizes, default=None),
            evidence=tuple(worst_first[:MAX_EVIDENCE]),
            correction=old.correction or correction,
        )

    def has(self, *kinds: str) -> bool:
        """Return True if a fault of one of these kinds was added."""
        return any((kind, None) in self._kept for kind in kinds)

    def listed(self) -> tuple[Finding, ...]:
        """Return all findings: faults, then notes."""
        found = [replace(finding, title=_filled_title(finding)) for finding in self._kept.values()]
        return tuple(sorted(found, key=lambda one: one.severity != "fault"))


def _filled_title(finding: Finding) -> str:
    title = finding.title.replace("{extent}", "{count} of {of}, up to {worst} nats")
    title = title.replace("{count}", f"{finding.count:,}").replace("{of}", f"{finding.of:,}")
    return title.replace("{worst}", f"{finding.worst_nats or 0:.3g}")


def _distance(evidence: Evidence) -> float:
    if evidence.theirs is None or evidence.ours is None:
        return 0.0
    return abs(evidence.theirs - evidence.ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors, in nats, of the log-probabilities reported for one kind of request.

    They are measured against the distribution that fits best. `ask` describes the request.
    """

    ask: str
    distribution: str
    count: int
    worst: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiness:
    """Comparison of a reply under another circumstance (cached, ...) with the logprobs that it should have.

    `worst` is the largest difference in nats, and `begins_at` the first row that differs.
    """

    circumstance: str
    is_equal: bool
    worst: float | None = None
    begins_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """The log-probability of one token, stored for a later audit; None if impossible (-inf)."""

    position: int
    token_id: int
    theirs: float | None
    ours: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrompt:
    """The stored log-probabilities for one prompt."""

    ask: str
    where: Where
    prompt: str
    token_ids: tuple[int, ...]
    rows: tuple[StoredRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The findings of one audit of one endpoint."""

    created: str  # ISO 8601, UTC
    endpoint: str
    model: str
    lora: str | None
    server: str | None  # `owned_by` of the model, usually the server's name
    ours: dict[str, Any]  # facts about the model that computed the exact rows, from `LogprobsInfo`
    max_nats: float
    requests: int
    rows: int
    distributions: dict[str, str]
    errors: tuple[Errors, ...]
    steadiness: tuple[Steadiness, ...]
    findings: tuple[Finding, ...]
    stored: tuple[StoredPrompt, ...]
    worst_nats: float
    version: int = VERSION

    @property
    def numbers(self) -> Literal["PASS", "FAIL"]:
        """PASS if log-probabilities were compared, are within `max_nats`, and have no other fault."""
        is_near = bool(self.errors) and self.worst_nats <= self.max_nats
        return "PASS" if is_near and not self.faults else "FAIL"

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The faults in log-probabilities, without notes."""
        return tuple(one for one in self.findings if one.severity == "fault" and one.kind in NUMBER_KINDS)

    def plot(self, path: str | Path) -> None:
        """Plot the endpoint's log-probabilities of the stored prompts against the exact ones.

        Requires the extra `plot`.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        from logprobe.records.forms.picture import new_figure

        figure = new_figure(figsize=(9, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for where in ("prompt", "completion"):
            numbers = np.array(
                [
                    (row.position, row.theirs, row.ours)
                    for prompt in self.stored
                    if prompt.where == where
                    for row in prompt.rows
                    if row.theirs is not None and row.ours is not None
                ]
            ).reshape(-1, 3)
            positions, theirs, ours = numbers.T
            left.plot(ours, theirs, ".", markersize=2, label=where)
            right.plot(positions, np.maximum(np.abs(theirs - ours), PLOT_FLOOR_NATS), ".", markersize=2)
        left.axline((0, 0), slope=1, linewidth=0.8)
        left.set(xlabel="exact logprob (nats)", ylabel="endpoint's logprob (nats)")
        left.legend()
        right.axhline(self.max_nats, linewidth=0.8)
        right.set(xlabel="position", ylabel="difference (nats)", yscale="log")
        figure.savefig(path, format="png")

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict and all fields as JSON-compatible values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return {"numbers": self.numbers} | values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AuditReport:
        """Build a report from the values that `to_dict` returned.

        Raises:
            InputError: the values are not a report, or the report has another version.
        """
        version = values.get("version") if isinstance(values, dict) else None
        check_version(version, VERSION, "audit report")
        try:
            return msgspec.convert(values, cls)
        except (msgspec.ValidationError, RecursionError) as error:
            raise InputError(f"audit report: {error}") from error
