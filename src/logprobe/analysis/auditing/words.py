"""Texts that describe an audit report in the terminal and the documentation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

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


def nats(value: float) -> str:
    """Format a value in nats."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.1e}"


def distribution_words(name: str) -> str:
    """Describe a distribution by its name; names joined by `+` are described one after the other."""
    return ", ".join(DISTRIBUTION_WORDS.get(part, part) for part in name.split("+"))


def evidence_words(evidence: Evidence) -> str:
    """Return the request, row and token of a piece of evidence, both log-probabilities, and the note."""
    row = None if evidence.position is None else f"{evidence.where} row {evidence.position}"
    token = None if evidence.token is None else repr(evidence.token)
    place = ", ".join(part for part in (evidence.ask, row, token) if part is not None)
    values = {"theirs": evidence.theirs, "ours": evidence.ours}
    numbers = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if value is not None)
    return f"{place}: {'; '.join(part for part in (numbers, evidence.note) if part)}"


def errors_words(report: AuditReport) -> str | None:
    """Summarize all errors in a line; None if there are none."""
    if not report.errors:
        return None
    worst, count = max(report.errors, key=lambda row: row.worst), sum(row.count for row in report.errors)
    mean = math.fsum(row.mean * row.count for row in report.errors) / max(count, 1)
    return f"{count:,} numbers: worst {nats(worst.worst)} ({worst.ask}), mean {nats(mean)}"


def steadiness_words(report: AuditReport) -> str | None:
    """Return under how many circumstances log-probabilities were steady, and the worst; None if untested."""
    if not report.steadiness:
        return None
    unsteady = [row for row in report.steadiness if not row.is_equal]
    num_rows = len(report.steadiness)
    words = f"steady in {num_rows - len(unsteady)} of {num_rows} circumstances"
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
