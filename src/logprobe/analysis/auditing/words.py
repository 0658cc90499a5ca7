"""Lines of an audit report for the terminal and the documentation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.analysis.auditing.report import Area, AuditReport, Evidence, Finding, Steadiness

Numbers: TypeAlias = Literal["chosen", "alternatives"]

DISTRIBUTION_WORDS: Final = {
    "raw": "the model's own",
    "temperature": "after temperature",
    "kept": "what truncation kept, not renormalised",
    "renormalised": "what truncation kept, renormalised",
    "penalised": "after penalties",
    "masked": "after a mask or a bias",
    "scaled": "after a temperature that nobody asked",
    "none": "none that was computed",
}
"""Distribution name → description."""


def numbers_summary(report: AuditReport) -> str:
    """Return the worst error with the limit, and the kinds of faults in numbers."""
    if not report.errors:
        return "no number could be compared"
    worst = f"worst {nats(report.worst_nats)} nats (at most {report.max_nats:g})"
    return ", ".join([worst, *_kinds(report, "numbers")])


def conformance_summary(report: AuditReport) -> str:
    """Return the kinds of conformance faults, and how many notes there are."""
    notes = sum(finding.severity == "note" for finding in report.findings)
    return ", ".join([*(_kinds(report, "conformance") or ["no fault"]), _count(notes, "note")])


def _kinds(report: AuditReport, area: Area) -> list[str]:
    return [finding.kind for finding in report.faults(area)]


def measured(report: AuditReport) -> str:
    """Return the numbers of requests and rows that the verdict is based on."""
    return f"{_count(report.requests, 'request')}, {_count(report.rows, 'row')}"


def asked_of(report: AuditReport) -> str:
    """Return the endpoint, model and LoRA that were audited."""
    lora = f", LoRA {report.lora}" if report.lora else ""
    return f"{report.endpoint}, model {report.model}{lora}"


def nats(value: float | None) -> str:
    """Format a number of nats; `-` for None."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.1e}"


def distribution_words(name: str) -> str:
    """Describe a distribution; parts of the name joined by `+` are described in order."""
    return ", ".join(DISTRIBUTION_WORDS.get(part, part) for part in name.split("+"))


def place_of(evidence: Evidence) -> str:
    """Return the ask, position and token of a piece of evidence."""
    parts = [evidence.ask]
    if evidence.position is not None:
        parts.append(f"{evidence.where} row {evidence.position}")
    place = ", ".join(parts)
    return place if evidence.token is None else f"{place}, {evidence.token!r}"


def numbers_of(evidence: Evidence) -> str:
    """Return the server's and the exact number, where present, and the note."""
    numbers = [f"{name} {value:.4f}" for name, value in (("theirs", evidence.theirs), ("ours", evidence.ours))
               if value is not None]  # fmt: skip
    return "; ".join(
        [*([", ".join(numbers)] if numbers else []), *([evidence.note] if evidence.note else [])]
    )


def extent_of(finding: Finding) -> str:
    """Return the count of a finding, of how many checked."""
    return f"{finding.count:,} of {finding.of:,}" if finding.of else ""


def errors_words(report: AuditReport, of: Numbers) -> str | None:
    """Summarize the errors of one kind of numbers in a line; None if none were compared."""
    rows = [row for row in report.errors if row.of == of]
    if not rows:
        return None
    worst = max(rows, key=lambda row: row.worst)
    count = sum(row.count for row in rows)
    mean = math.fsum(row.mean * row.count for row in rows) / max(count, 1)
    words = f"{count:,} {of}: worst {nats(worst.worst)} ({worst.ask}), mean {nats(mean)}"
    if flips := sum(row.rank_flips for row in rows):
        words += f", {_count(flips, 'rank flip')} up to {nats(max(row.widest_flip or 0.0 for row in rows))}"
    return words


def steadiness_words(report: AuditReport) -> str | None:
    """Summarize all circumstances in a line: how many were steady, and the worst of the others."""
    rows = report.steadiness
    if not rows:
        return None
    unsteady = [row for row in rows if not row.is_equal]
    words = f"steady in {len(rows) - len(unsteady)} of {_count(len(rows), 'circumstance')}"
    if not unsteady:
        return words
    worst = max(unsteady, key=lambda row: math.inf if row.worst is None else row.worst)
    return f"{words}; {worst.circumstance}: {steady_words(worst)}"


def steady_words(row: Steadiness) -> str:
    """Describe the outcome of one circumstance."""
    if row.is_equal and not row.worst:
        return "equal bits"
    if row.worst is None:
        return "differs"
    begin = "" if row.begins_at is None else f" from row {row.begins_at} on"
    return f"up to {nats(row.worst)}{begin}"


def some_of(asks: Sequence[str]) -> str:
    """Return the first ask, and the number of others."""
    return asks[0] if len(asks) == 1 else f"{asks[0]} and {len(asks) - 1} more"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
