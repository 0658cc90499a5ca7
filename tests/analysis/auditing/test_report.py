"""A report goes through JSON and comes back whole; one fault a kind with the counts of all, notes apart."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from logprobe.analysis.auditing.report import (
    MAX_EVIDENCE,
    AuditReport,
    Errors,
    Evidence,
    Finding,
    Findings,
    Steadiness,
    StoredPrompt,
    StoredRow,
)
from logprobe.errors import InputError, MissingPackageError

if TYPE_CHECKING:
    from pathlib import Path

EVIDENCE = Evidence(ask="echo", prompt="The sky", position=1, where="prompt", theirs=-1.0, ours=-2.0)
FINDING = Finding(kind="shifted", severity="fault", title="…", count=1, of=2, evidence=(EVIDENCE,))
REPORT = AuditReport(
    created="2026-01-01T00:00:00Z",
    endpoint="http://127.0.0.1:8000",
    model="m",
    lora=None,
    server=None,
    ours={"model": "m"},
    max_nats=0.01,
    requests=1,
    rows=2,
    distributions={"echo": "raw"},
    errors=(Errors(ask="echo", distribution="raw", count=2, worst=1.0, mean=0.5),),
    steadiness=(Steadiness(circumstance="alone", is_equal=True),),
    findings=(FINDING,),
    stored=(
        StoredPrompt(
            ask="echo",
            where="prompt",
            prompt="The sky",
            token_ids=(1, 2),
            rows=(StoredRow(position=1, token_id=2, theirs=None, ours=-2.0),),
        ),
    ),
    worst_nats=1.0,
)


def test_a_report_comes_back_whole_through_json() -> None:
    assert AuditReport.from_dict(json.loads(json.dumps(REPORT.to_dict()))) == REPORT


def test_numbers_pass_within_the_limit_and_without_a_fault_of_their_own() -> None:
    near = replace(REPORT, worst_nats=0.01, findings=())
    assert near.numbers == "PASS"
    assert replace(near, findings=(FINDING,)).numbers == "FAIL"
    assert replace(near, findings=(replace(FINDING, severity="note"),)).numbers == "PASS"
    assert replace(near, worst_nats=0.011).numbers == "FAIL"
    assert replace(near, errors=()).numbers == "FAIL"  # nothing was compared


def test_the_verdict_is_written_first() -> None:
    values = REPORT.to_dict()
    assert (values["numbers"], [one.kind for one in REPORT.faults]) == ("FAIL", ["shifted"])


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match="matplotlib"):
        REPORT.plot(tmp_path / "numbers.png")


@pytest.mark.parametrize(
    "values", [{}, {"version": 1}, [], {"version": 2}, {**REPORT.to_dict(), "rows": "many"}]
)
def test_what_is_no_report_is_refused(values: object) -> None:
    with pytest.raises(InputError, match="audit report"):
        AuditReport.from_dict(values)  # type: ignore[arg-type]


# -- findings ------------------------------------------------------------------------------------------------


def evidence(theirs: float) -> Evidence:
    return Evidence(ask="echo", prompt="a", position=1, where="prompt", theirs=theirs, ours=0.0)


def test_what_is_found_again_adds_to_its_counts() -> None:
    findings = Findings()
    for worst in (0.25, 0.5, 0.125):
        findings.add("stale-weights", worst=worst, of=2, evidence=[evidence(-worst)] * MAX_EVIDENCE)
    (found,) = findings.listed()
    assert (found.count, found.of, found.worst_nats) == (3, 6, 0.5)
    assert found.title.startswith("3 of 6 numbers")
    assert found.title.endswith("up to 0.5 nats")
    assert [one.theirs for one in found.evidence] == [-0.5] * MAX_EVIDENCE
    assert findings.has("bos", "stale-weights")


def test_notes_of_one_kind_keep_their_titles() -> None:
    findings = Findings()
    for title in ("no echo", "no prompt_logprobs", "no echo"):
        findings.add("form", title, is_note=True)
    counts = {one.title: one.count for one in findings.listed()}
    assert counts == {"no echo": 2, "no prompt_logprobs": 1}
    assert not findings.has("form")
