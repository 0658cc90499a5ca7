"""Print the results of audits, both for endpoints and for rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from logprobe.cli.tables import console, figure_lines, print_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.analysis.auditing.conformance import ConformanceReport
    from logprobe.analysis.auditing.report import AuditReport, Finding
    from logprobe.analysis.rollouts import RolloutReport


def print_report(report: AuditReport) -> None:
    """Print the verdict, the findings with one row of evidence each, and further measurements."""
    from logprobe.analysis.auditing.words import nats

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
    from logprobe.analysis.auditing.words import evidence_words

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
    from logprobe.analysis.auditing import words

    for distribution, asks in _grouped((name, ask) for ask, name in report.distributions.items()):
        others = f" and {len(asks) - 1} more" if asks[1:] else ""
        yield "distribution", f"{words.distribution_words(distribution)}: {asks[0]}{others}"
    lines = {
        "errors": words.errors_words(report),
        "steadiness": words.steadiness_words(report),
    }
    yield from ((name, line) for name, line in lines.items() if line is not None)


def _grouped(pairs: Iterable[tuple[str, str]]) -> Iterable[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups.items()


def _plain(text: str) -> str:
    """Escape non-printable characters in a text from an endpoint, because they could control the terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


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
    from logprobe.analysis.auditing.words import distribution_words

    scale = "" if report.scale is None else f", of {report.scale:.4g}"
    yield "stored numbers are", distribution_words(report.distribution) + scale
    yield "the trainer's", distribution_words(report.target)
    yield "mean error (nats)", ", ".join(f"{name} {error:.3g}" for name, error in report.errors.items())
    yield from (("as stored, " + name, line) for name, line in figure_lines(report.as_stored.to_dict()))
    if report.corrected is not None and report.correction is not None:
        yield from (("corrected, " + name, line) for name, line in figure_lines(report.corrected.to_dict()))
