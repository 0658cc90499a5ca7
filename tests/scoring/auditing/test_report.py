"""A report is plain data: it goes through JSON and comes back whole."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from logprobe.errors import InputError
from logprobe.scoring.auditing.report import (
    AuditReport,
    Distance,
    Errors,
    Evidence,
    FieldAnswer,
    Finding,
    Steadiness,
    StoredPrompt,
    StoredRow,
)

EVIDENCE = Evidence(ask="echo", prompt="The sky", position=1, where="prompt", theirs=-1.0, ours=-2.0)
FINDING = Finding(kind="shifted", severity="wrong", title="…", count=1, of=2, evidence=(EVIDENCE,))
REPORT = AuditReport(
    created="2026-01-01T00:00:00Z",
    endpoint="http://127.0.0.1:8000",
    model="m",
    lora=None,
    server=None,
    ours={"model": "m"},
    max_nats=0.01,
    asks=("echo",),
    requests=1,
    rows=2,
    distributions={"echo": "raw"},
    errors=(Errors(ask="echo", of="chosen", distribution="raw", count=2, worst=1.0, mean=0.5, p99=1.0),),
    steadiness=(Steadiness(circumstance="alone", requests=3, is_equal=True),),
    fields=(FieldAnswer(field="completions.logprobs", form="whole", answer="answered"),),
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
    precision=(Distance(precision="float32", mean=0.0, worst=0.0),),
)


def test_a_report_comes_back_whole_through_json() -> None:
    assert AuditReport.from_dict(json.loads(json.dumps(REPORT.to_dict()))) == REPORT


def test_a_note_leaves_an_endpoint_truthful_and_a_wrong_finding_does_not() -> None:
    assert not REPORT.is_truthful
    assert replace(REPORT, findings=(replace(FINDING, severity="note"),)).is_truthful


@pytest.mark.parametrize(
    "values", [{}, {"version": 2}, [], {"version": 1}, {**REPORT.to_dict(), "rows": "many"}]
)
def test_what_is_no_report_is_refused(values: object) -> None:
    with pytest.raises(InputError, match="audit report"):
        AuditReport.from_dict(values)  # type: ignore[arg-type]
