"""Texts that describe an audit report in the terminal and the documentation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from logprobe.analysis.auditing.report import AuditReport, Evidence, Steadiness

DISTRIBUTION_WORDS: Final = {
    "raw": "the model's own",
    "temperature": "after temperature",
    "kept": "what truncation kept, not renormalized",
    "renormalised": "what truncation kept, renormalized",
    "penalised": "after penalties",
    "masked": "after a mask or a bias",
    "scaled": "after a temperature that was not requested",
    "none": "none that was computed",
}
"""Description of each distribution, by name."""


def numbers_summary(report: AuditReport) -> str:
    """Return the worst error with the limit, and the kinds of faults in log-probabilities."""
    if not report.errors:
        return "no number could be compared"
    worst = f"worst {nats(report.worst_nats)} nats (at most {report.max_nats:g})"
    return ", ".join([worst, *(finding.kind for finding in report.faults("numbers"))])


def conformance_summary(report: AuditReport) -> str:
    """Return the kinds of conformance faults, and the number of notes."""
    kinds = [finding.kind for finding in report.faults("conformance")] or ["no fault"]
    notes = sum(finding.severity == "note" for finding in report.findings)
    return ", ".join([*kinds, _count(notes, "note")])


def audited(report: AuditReport) -> str:
    """Return the endpoint and model that were audited, and the numbers of requests and rows."""
    lora = f", LoRA {report.lora}" if report.lora else ""
    server = f" ({report.server})" if report.server else ""
    counts = f"{_count(report.requests, 'request')}, {_count(report.rows, 'row')}"
    return f"{report.endpoint}, model {report.model}{lora}{server}; {counts}"


def nats(value: float | None) -> str:
    """Format a value in nats; None becomes `-`."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.1e}"


def distribution_words(name: str) -> str:
    """Describe a distribution by its name; names joined by `+` are described one after the other."""
    return ", ".join(DISTRIBUTION_WORDS.get(part, part) for part in name.split("+"))


def place_of(evidence: Evidence) -> str:
    """Return the request, row and token that a piece of evidence refers to."""
    row = None if evidence.position is None else f"{evidence.where} row {evidence.position}"
    token = None if evidence.token is None else repr(evidence.token)
    return ", ".join(part for part in (evidence.ask, row, token) if part is not None)


def numbers_of(evidence: Evidence) -> str:
    """Return the server's and the exact log-probability, if present, and the note."""
    values = {"theirs": evidence.theirs, "ours": evidence.ours}
    numbers = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if value is not None)
    return "; ".join(part for part in (numbers, evidence.note) if part)


def errors_words(report: AuditReport, of: Literal["chosen", "alternatives"]) -> str | None:
    """Summarize the errors of chosen tokens or of alternatives in a line; None if none were compared."""
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
    """Summarize the steadiness checks in a line; None if there were none.

    The line says under how many circumstances the log-probabilities were steady, and which one was worst.
    """
    if not report.steadiness:
        return None
    unsteady = [row for row in report.steadiness if not row.is_equal]
    num_rows = len(report.steadiness)
    words = f"steady in {num_rows - len(unsteady)} of {_count(num_rows, 'circumstance')}"
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


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
