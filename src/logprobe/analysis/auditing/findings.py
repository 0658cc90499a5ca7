"""Collect the findings of an audit: one fault per kind, with its worst evidence.

Notes are kept per kind and title, since each title is about a different form, check or request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from logprobe.analysis.auditing.report import KINDS, MAX_EVIDENCE, Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logprobe.analysis.auditing.report import Severity


@dataclass(slots=True)
class _Kept:
    title: str
    count: int = 0
    of: int = 0
    worst: float | None = None
    evidence: list[Evidence] = field(default_factory=list)
    correction: str | None = None


@final
class Findings:
    """Findings by kind, notes by title; repeated findings add to the counts."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Severity, str], _Kept] = {}

    def add(
        self,
        kind: str,
        title: str,
        *,
        severity: Severity = "fault",
        evidence: Iterable[Evidence] = (),
        worst: float | None = None,
        count: int = 1,
        of: int = 1,
        correction: str | None = None,
    ) -> None:
        """Add a finding; {count}, {of} and {worst} in `title` become the totals of its kind."""
        assert kind in KINDS, kind
        key = kind, severity, title if severity == "note" else ""
        kept = self._kept.setdefault(key, _Kept(title))
        kept.count += count
        kept.of += of
        kept.worst = worst if kept.worst is None else max(kept.worst, worst or 0.0)
        kept.evidence += evidence
        kept.evidence.sort(key=_distance, reverse=True)
        del kept.evidence[MAX_EVIDENCE:]
        kept.correction = kept.correction or correction

    def has(self, *kinds: str) -> bool:
        """Return whether there is a fault of one of these kinds."""
        return any((kind, "fault", "") in self._kept for kind in kinds)

    def listed(self) -> tuple[Finding, ...]:
        """Return all findings: faults in numbers, then faults in conformance, then notes."""
        found = [
            Finding(
                kind=kind,
                severity=severity,
                title=kept.title.replace("{count}", f"{kept.count:,}")
                .replace("{of}", f"{kept.of:,}")
                .replace("{worst}", f"{kept.worst or 0.0:.3g}"),
                count=kept.count,
                of=kept.of,
                worst_nats=kept.worst,
                evidence=tuple(kept.evidence),
                correction=kept.correction,
            )
            for (kind, severity, _), kept in self._kept.items()
        ]
        return tuple(sorted(found, key=lambda one: (one.severity != "fault", one.area != "numbers")))


def _distance(evidence: Evidence) -> float:
    if evidence.theirs is None or evidence.ours is None:
        return 0.0
    return abs(evidence.theirs - evidence.ours)
