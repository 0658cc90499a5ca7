"""Print the results of audits, both for endpoints and for rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from logprobe.cli.tables import console, figure_lines, print_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.analysis.auditing.report import AuditReport, Finding
    from logprobe.analysis.rollouts import RolloutReport


def print_report(report: AuditReport) -> None:
    """Print both verdicts, the findings with one example each, and further measurements."""
    from logprobe.analysis.auditing import words

    screen = console()
    colour = "bold green" if report.numbers == "PASS" else "bold red"
    first = Text.assemble("numbers: ", (report.numbers, colour), f"  {words.numbers_summary(report)}")
    screen.print(first, soft_wrap=True)
    screen.print(f"API conformance: {words.conformance_summary(report)}", soft_wrap=True)
    screen.print(_plain(words.audited(report)), soft_wrap=True)
    for finding in report.findings:
        screen.print()
        for line in _finding_lines(finding):
            screen.print(line, soft_wrap=True)
    screen.print()
    if facts := [[name, _plain(value)] for name, value in _facts(report)]:
        print_facts(facts)


def _finding_lines(finding: Finding) -> Iterator[Text]:
    from logprobe.analysis.auditing.words import numbers_of, place_of

    style = "red" if finding.severity == "fault" else "yellow"
    extent = f"  ({finding.count:,} of {finding.of:,})" if finding.of > 1 else ""
    yield Text.assemble(
        (f"{finding.severity:<5}", style), f"  {finding.kind}: {_plain(finding.title)}{extent}"
    )
    for row in finding.evidence[:1]:
        yield Text(f"       {_plain(place_of(row))}: {_plain(numbers_of(row))}")
    if finding.correction is not None:
        yield Text(f"       to correct: {_plain(finding.correction)}")


def _facts(report: AuditReport) -> Iterator[tuple[str, str]]:
    from logprobe.analysis.auditing import words

    for distribution, asks in _grouped((name, ask) for ask, name in report.distributions.items()):
        others = f" and {len(asks) - 1} more" if asks[1:] else ""
        yield "distribution", f"{words.distribution_words(distribution)}: {asks[0]}{others}"
    of_all = {
        "errors": words.errors_words(report, "chosen"),
        "": words.errors_words(report, "alternatives"),
        "steadiness": words.steadiness_words(report),
    }
    yield from ((name, line) for name, line in of_all.items() if line is not None)
    for answer, fields in _grouped((row.answer, row.field) for row in report.fields):
        if answer != "answered":
            yield answer, ", ".join(dict.fromkeys(fields))


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
