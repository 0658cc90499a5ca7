"""Print the results of audits, both for endpoints and for rollouts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from rich.text import Text

from logprobe.cli.tables import console, figure_lines, print_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.analysis.auditing.conformance import ConformanceReport
    from logprobe.analysis.auditing.report import AuditReport, Evidence, Finding, Steadiness
    from logprobe.analysis.rollouts import RolloutReport

DISTRIBUTION_WORDS: Final = {
    "raw": "the model's own",
    "temperature": "after temperature",
    "kept": "what truncation kept, not renormalized",
    "renormalised": "what truncation kept, renormalized",
    "penalised": "after penalties",
    "masked": "after a mask or a bias",
    "scaled": "after a temperature that was not requested",
    "none": "none of the distributions that were computed",
}
"""Description of each distribution, by name."""


def print_report(report: AuditReport) -> None:
    """Print the verdict, the findings with one row of evidence each, and further measurements."""
    screen = console()
    colour = "bold green" if report.numbers == "PASS" else "bold red"
    words = "no number could be compared"
    if report.errors:
        worst = f"worst {nats(report.worst_nats)} nats (at most {report.max_nats:g})"
        words = ", ".join([worst, *(finding.kind for finding in report.faults)])
    screen.print(Text.assemble("numbers: ", (report.numbers, colour), f"  {words}"), soft_wrap=True)
    lora = f", LoRA {report.lora}" if report.lora else ""
    server = f" ({report.server})" if report.server else ""
    counts = f"{report.requests:,} requests, {report.rows:,} rows"
    line = f"{report.endpoint}, model {report.model}{lora}{server}; {counts}"
    screen.print(_plain(line), soft_wrap=True)
    _print_findings(report.findings)
    if facts := [[name, _plain(value)] for name, value in _facts(report)]:
        print_facts(facts)


def print_conformance(report: ConformanceReport) -> None:
    """Print the kinds of faults, the findings, and the fields that are not applied."""
    screen = console()
    kinds = ", ".join(finding.kind for finding in report.faults) or "no fault"
    screen.print(f"API conformance: {kinds}", soft_wrap=True)
    server = f" ({report.server})" if report.server else ""
    line = f"{report.endpoint}, model {report.model}{server}; {report.requests:,} requests"
    screen.print(_plain(line), soft_wrap=True)
    _print_findings(report.findings)
    answers = _grouped((answer.partition(":")[0], name) for name, answer in report.fields.items())
    if facts := [[answer, ", ".join(names)] for answer, names in answers if answer != "applied"]:
        print_facts(facts)


def _print_findings(findings: Iterable[Finding]) -> None:
    screen = console()
    for finding in findings:
        style = "red" if finding.severity == "fault" else "yellow"
        extent = f"  ({finding.count:,} of {finding.of:,})" if finding.of > 1 else ""
        title = f"  {finding.kind}: {_plain(finding.title)}{extent}"
        lines = [Text.assemble((f"{finding.severity:<5}", style), title)]
        lines += [Text(f"       {_plain(evidence_words(row))}") for row in finding.evidence[:1]]
        if finding.correction is not None:
            lines.append(Text(f"       to correct: {_plain(finding.correction)}"))
        screen.print()
        for text in lines:
            screen.print(text, soft_wrap=True)
    screen.print()


def _facts(report: AuditReport) -> Iterator[tuple[str, str]]:
    for distribution, asks in _grouped((name, ask) for ask, name in report.distributions.items()):
        others = f" and {len(asks) - 1} more" if asks[1:] else ""
        yield "distribution", f"{distribution_words(distribution)}: {asks[0]}{others}"
    if report.errors:
        yield "errors", errors_words(report)
    if report.steadiness:
        yield "steadiness", steadiness_words(report)


def _grouped(pairs: Iterable[tuple[str, str]]) -> Iterable[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups.items()


def _plain(text: str) -> str:
    """Escape non-printable characters in a text from an endpoint, because they could control the terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


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


def errors_words(report: AuditReport) -> str:
    """Summarize all errors in a line; there must be some."""
    worst, count = max(report.errors, key=lambda row: row.worst), sum(row.count for row in report.errors)
    mean = math.fsum(row.mean * row.count for row in report.errors) / max(count, 1)
    return f"{count:,} numbers: worst {nats(worst.worst)} ({worst.ask}), mean {nats(mean)}"


def steadiness_words(report: AuditReport) -> str:
    """Return in how many circumstances log-probabilities were steady, and the worst unsteady circumstance."""
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


def print_rollouts(report: RolloutReport, max_nats: float) -> None:
    """Print whether stored log-probabilities match the trainer's, and the correction if they do not."""
    screen = console()
    worst = f"worst {report.as_stored.worst_nats:.6g} nats"
    if report.corrected is not None and report.correction is not None:
        worst += f", {report.corrected.worst_nats:.6g} once corrected"
    size = f"{report.num_tokens:,} tokens of {report.num_sequences:,} samples"
    screen.print(Text.assemble(_rollouts_verdict(report, max_nats), f"  {worst}, {size}"), soft_wrap=True)
    if report.correction is not None:
        screen.print(f"to correct: {report.correction}", soft_wrap=True)
    screen.print()
    print_facts(list(_rollouts_facts(report)))


def _rollouts_verdict(report: RolloutReport, max_nats: float) -> tuple[str, str]:
    """Return the verdict and its color."""
    if report.is_right(max_nats):
        return "PASS", "bold green"
    corrected = report.corrected
    if report.correction is not None and corrected is not None and corrected.worst_nats <= max_nats:
        return "TO CORRECT", "bold yellow"
    return "FAIL", "bold red"


def _rollouts_facts(report: RolloutReport) -> Iterator[tuple[str, str]]:
    scale = "" if report.scale is None else f", of {report.scale:.4g}"
    yield "stored numbers are", distribution_words(report.distribution) + scale
    yield "the trainer's", distribution_words(report.target)
    yield "mean error (nats)", ", ".join(f"{name} {error:.3g}" for name, error in report.errors.items())
    yield from (("as stored, " + name, line) for name, line in figure_lines(report.as_stored.to_dict()))
    if report.corrected is not None and report.correction is not None:
        yield from (("corrected, " + name, line) for name, line in figure_lines(report.corrected.to_dict()))
