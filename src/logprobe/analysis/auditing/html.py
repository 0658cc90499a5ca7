"""An audit as one page of HTML: the verdicts, findings with their evidence, plots and tables.

The page is whole: its style and its plots stand in it, and it fetches and runs nothing. Texts of the endpoint
are escaped. Before it: `AuditReport`. After it: a browser.
"""

from __future__ import annotations

import math
import re
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logprobe.analysis.auditing.report import KINDS
from logprobe.analysis.auditing.svg import WIDE, Axis, Plot, Points
from logprobe.analysis.auditing.words import (
    asked_of,
    conformance_summary,
    distribution_words,
    extent_of,
    measured,
    nats,
    numbers_summary,
    place_of,
    steady_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from logprobe.analysis.auditing.report import AuditReport, Evidence, FieldAnswer, Finding, Where

MAX_POINTS: Final = 4000  # of a plot: the worst, and of the others an even share
NUM_NOTED: Final = 12  # points that the pointer tells about: the worst
EQUAL_NATS: Final = 1e-8  # where differences of nothing are drawn
FLOOR_NATS: Final = -30.0  # where less probable ones are drawn
LENGTH: Final = re.compile(r"prompt of (\d+) tokens")
WHERES: Final[tuple[tuple[Where, str], ...]] = (("prompt", "one"), ("completion", "two"))
ANSWERS: Final = {"answered": "good", "refused": "soft", "ignored": "bad", "error": "bad"}

STYLE: Final = Path(__file__).with_name("page.css")


def page(report: AuditReport) -> str:
    """The whole page of a report."""
    title = escape(f"{report.numbers}: {report.endpoint}")
    style = STYLE.read_text(encoding="utf-8")
    made = f"logprobe {version('logprobe')}, {report.created}. Exact numbers: {_ours(report)}."
    sections = [
        _findings(report),
        _plots(report),
        _errors(report),
        _steadiness(report),
        _fields(report),
        _precision(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head><body>\n"
        f"{_head(report)}\n{''.join(sections)}\n"
        f"<footer>{escape(made)}</footer></body></html>\n"
    )


def _head(report: AuditReport) -> str:
    server = "" if report.server is None else f" It says that it is {escape(report.server)}."
    return (
        f'<header class="{"good" if report.numbers == "PASS" else "bad"}"><h1>Numbers: {report.numbers}</h1>'
        f"<p>{escape(numbers_summary(report))}</p>"
        f"<p>API conformance: {escape(conformance_summary(report))}</p>"
        f'<p class="soft">{escape(asked_of(report))}; {measured(report)}.{server}</p></header>'
    )


def _ours(report: AuditReport) -> str:
    return ", ".join(
        f"{name} {value}" for name, value in report.ours.items() if isinstance(value, str | int | float)
    )


# -- findings ------------------------------------------------------------------------------------------------


def _findings(report: AuditReport) -> str:
    if not report.findings:
        return "<h2>Findings</h2><p>None.</p>"
    return "<h2>Findings</h2>" + "".join(map(_finding, report.findings))


def _finding(finding: Finding) -> str:
    parts = (finding.severity, finding.area, finding.kind, extent_of(finding))
    extent = " · ".join(part for part in parts if part)
    fix = (
        ""
        if finding.correction is None
        else f'<p class="fix"><b>To correct:</b> {escape(finding.correction)}</p>'
    )
    meaning = KINDS.get(finding.kind, "")
    return (
        f'<section class="finding {finding.severity}"><p class="kind" title="{escape(meaning, quote=True)}">'
        f"{escape(extent)}</p><h3>{escape(finding.title)}</h3>{_evidence(finding.evidence)}{fix}</section>"
    )


def _evidence(rows: Sequence[Evidence]) -> str:
    if not rows:
        return ""
    lines = [
        [
            escape(place_of(row)),
            f"<code>{escape(row.prompt)}</code>",
            _number(row.theirs),
            _number(row.ours),
            nats(_apart(row.theirs, row.ours)),
            escape(row.note),
        ]
        for row in rows
    ]
    return _table(("where", "prompt", "theirs", "ours", "apart", ""), lines, numbers=(2, 3, 4))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _apart(theirs: float | None, ours: float | None) -> float | None:
    return None if theirs is None or ours is None else abs(theirs - ours)


# -- plots ---------------------------------------------------------------------------------------------------


def _plots(report: AuditReport) -> str:
    rows = {where: list(_rows_of(report, where)) for where, _ in WHERES}
    figures = []
    if any(rows.values()):
        figures += [_scatter(rows), _by_position(rows, report.max_nats)]
    lengths = [
        (int(found[1]), row.worst)
        for row in report.steadiness
        if (found := LENGTH.match(row.circumstance)) and row.worst is not None
    ]
    if lengths:
        figures.append(_by_length(lengths, report.max_nats))
    return f'<h2>Theirs beside ours</h2><div class="plots">{"".join(figures)}</div>' if figures else ""


def _rows_of(report: AuditReport, where: Where) -> Iterator[tuple[int, float, float, str]]:
    """Position, their number, ours, and what the pointer says; rows that lack one of them are left out."""
    for prompt in report.stored:
        for row in prompt.rows:
            if prompt.where == where and row.theirs is not None and row.ours is not None:
                text = f"{prompt.ask}, {prompt.prompt!r}, row {row.position}"
                yield (
                    row.position,
                    row.theirs,
                    row.ours,
                    f"{text}: theirs {row.theirs:.6g}, ours {row.ours:.6g}",
                )


_Rows = list[tuple[int, float, float, str]]


def _scatter(rows: dict[Where, _Rows]) -> str:
    values = [value for of in rows.values() for _, theirs, ours, _ in of for value in (theirs, ours)]
    low = max(min(values), FLOOR_NATS)
    high = max(0.0, min(max(values), 1.0))
    low, high = low - 0.03 * (high - low or 1), high + 0.03 * (high - low or 1)
    groups = [
        Points(
            name=where,
            kind=kind,
            at=[(ours, theirs) for _, theirs, ours, _ in _thinned(rows[where])],
            notes=[(ours, theirs, note) for _, theirs, ours, note in _worst(rows[where])],
        )
        for where, kind in WHERES
    ]
    x = Axis(label="ours (nats)", low=low, high=high)
    y = Axis(label="theirs (nats)", low=low, high=high)
    return Plot(title="Each number beside the exact one", x=x, y=y, has_diagonal=True).figure(groups)


def _by_position(rows: dict[Where, _Rows], max_nats: float) -> str:
    groups = [
        Points(
            name=where,
            kind=kind,
            at=[(position, abs(theirs - ours)) for position, theirs, ours, _ in _thinned(rows[where])],
            notes=[
                (position, abs(theirs - ours), note) for position, theirs, ours, note in _worst(rows[where])
            ],
        )
        for where, kind in WHERES
    ]
    last = max(position for group in groups for position, _ in group.at)
    x = Axis(label="position", low=0.0, high=float(max(last, 1)))
    y = _error_axis(groups, max_nats)
    return Plot(title="Errors by position", x=x, y=y, limit=max_nats).figure(groups)


def _by_length(lengths: list[tuple[int, float]], max_nats: float) -> str:
    ordered = sorted(lengths)
    places = [(float(place), worst) for place, (_, worst) in enumerate(ordered)]
    notes = [
        (place, worst, f"prompt of {length} tokens: {nats(worst)} nats")
        for (place, worst), (length, _) in zip(places, ordered, strict=True)
    ]
    group = Points(name="", kind="one", at=places, notes=notes)
    x = Axis(
        label="tokens of the prompt",
        low=-0.5,
        high=len(ordered) - 0.5,
        names=[str(length) for length, _ in ordered],
    )
    y = _error_axis([group], max_nats)
    return Plot(title="Errors by length of the prompt", x=x, y=y, width=WIDE, limit=max_nats).figure([group])


def _error_axis(groups: Iterable[Points], max_nats: float) -> Axis:
    errors = [error for group in groups for _, error in group.at if math.isfinite(error)]
    worst = max(max_nats, EQUAL_NATS, *errors)
    return Axis(label="apart (nats)", low=EQUAL_NATS, high=worst * 3, is_log=True, zero="equal")


def _worst(rows: _Rows) -> _Rows:
    return sorted(rows, key=lambda row: -abs(row[1] - row[2]))[:NUM_NOTED]


def _thinned(rows: _Rows) -> _Rows:
    """All of few rows; of many the worst half of what is drawn, and an even share of the others."""
    if len(rows) <= MAX_POINTS:
        return rows
    ordered = sorted(rows, key=lambda row: -abs(row[1] - row[2]))
    half = MAX_POINTS // 2
    return ordered[:half] + ordered[half :: -(-(len(ordered) - half) // half)]


# -- tables --------------------------------------------------------------------------------------------------


def _errors(report: AuditReport) -> str:
    lines = [
        [
            escape(row.ask),
            row.of,
            escape(distribution_words(row.distribution)),
            f"{row.count:,}",
            nats(row.worst),
            nats(row.mean),
            nats(row.p99),
            nats(row.kl),
            f"{row.rank_flips}" if row.of == "alternatives" else "-",
        ]
        for row in report.errors
    ]
    names = ("asked", "numbers", "of the distribution", "count", "worst", "mean", "p99", "KL", "rank flips")
    return _section("Distributions and errors", names, lines, numbers=(3, 4, 5, 6, 7, 8))


def _steadiness(report: AuditReport) -> str:
    lines = [
        [
            escape(row.circumstance),
            f"{row.requests}",
            f'<span class="{"good" if row.is_equal else ""}">{steady_words(row)}</span>',
        ]
        for row in report.steadiness
    ]
    return _section("Steadiness", ("circumstance", "requests", "outcome"), lines, numbers=(1,))


def _fields(report: AuditReport) -> str:
    forms = ("whole", "stream")
    answers: dict[str, dict[str, FieldAnswer]] = {}
    for row in report.fields:
        answers.setdefault(row.field, {})[row.form] = row
    lines = [
        [f"<code>{escape(field)}</code>", *(_answer(of.get(form)) for form in forms)]
        for field, of in answers.items()
    ]
    return _section("Fields", ("field", *forms), lines)


def _answer(row: FieldAnswer | None) -> str:
    if row is None:
        return "-"
    is_plain = row.answer == "answered" or not row.detail
    detail = "" if is_plain else f' <span class="soft">{escape(row.detail)}</span>'
    return f'<span class="{ANSWERS[row.answer]}">{row.answer}</span>{detail}'


def _precision(report: AuditReport) -> str:
    lines = [[escape(row.precision), nats(row.mean), nats(row.worst)] for row in report.precision]
    return _section(
        "Precision: the distance to our own runs", ("computed in", "mean", "worst"), lines, numbers=(1, 2)
    )


def _section(title: str, names: Sequence[str], lines: list[list[str]], *, numbers: Sequence[int] = ()) -> str:
    return (
        f'<h2>{title}</h2><div class="table">{_table(names, lines, numbers=numbers)}</div>' if lines else ""
    )


def _table(names: Sequence[str], lines: list[list[str]], *, numbers: Sequence[int] = ()) -> str:
    kinds = [' class="n"' if column in numbers else "" for column in range(len(names))]
    head = "".join(f"<th{kind}>{name}</th>" for kind, name in zip(kinds, names, strict=True))
    rows = "".join(
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(kinds, line, strict=True))}</tr>"
        for line in lines
    )
    return f"<table><tr>{head}</tr>{rows}</table>"
