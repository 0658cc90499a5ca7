"""Hand-made reports: an endpoint that passes, one that fails, and two about conformance."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from logprobe.analysis.auditing.conformance import ConformanceReport
from logprobe.analysis.auditing.report import (
    AuditReport,
    Errors,
    Evidence,
    Finding,
    Steadiness,
    StoredPrompt,
    StoredRow,
)

HOSTILE: Final = '<script>alert("1")</script>\x1b[2J'
"""Text from an endpoint that would run in an HTML page or clear a terminal."""

PASSING: Final = AuditReport(
    created="2026-01-01T00:00:00Z",
    endpoint="http://127.0.0.1:8000",
    model="m",
    lora=None,
    server="some server 1.2",
    ours={"model_id": "tiny", "dtype": "float32"},
    max_nats=0.01,
    requests=412,
    rows=9120,
    distributions={"echo": "raw", "completion, temperature 0.5": "temperature+renormalised"},
    errors=(
        Errors(ask="echo", distribution="raw", count=8, worst=2e-6, mean=1e-6),
        Errors(
            ask="echo",
            distribution="raw",
            count=40,
            worst=3e-6,
            mean=1e-6,
        ),
    ),
    steadiness=(
        Steadiness(circumstance="three times alone", is_equal=True, worst=0.0),
        Steadiness(circumstance="beside 8 others", is_equal=False, worst=2e-6, begins_at=3),
        Steadiness(circumstance="prompt of 64 tokens", is_equal=True, worst=0.0),
        Steadiness(circumstance="prompt of 65 tokens", is_equal=False, worst=2e-6, begins_at=64),
    ),
    findings=(Finding(kind="form", severity="note", title="It has no /v1/responses.", count=1, of=1),),
    stored=(
        StoredPrompt(
            ask="echo",
            where="prompt",
            prompt="The keys to the cabinet",
            token_ids=(1, 2, 3, 4),
            rows=tuple(
                StoredRow(position=place, token_id=place + 1, theirs=theirs, ours=ours)
                for place, theirs, ours in ((1, -1.0, -1.0), (2, -2.000001, -2.0), (3, None, -9.0))
            ),
        ),
        StoredPrompt(
            ask="completion",
            where="completion",
            prompt="The sky",
            token_ids=(5, 6),
            rows=(StoredRow(position=0, token_id=7, theirs=-0.5, ours=-0.50001),),
        ),
    ),
    worst_nats=3e-6,
)

FAULT: Final = Finding(
    kind="temperature-unasked",
    severity="fault",
    title="Numbers are after a temperature of 0.7 that was not requested.",
    count=138,
    of=140,
    worst_nats=2.31,
    evidence=tuple(
        Evidence(
            ask="completion, temperature 0",
            prompt=HOSTILE,
            position=place,
            where="completion",
            token=" Paris",  # noqa: S106 - not a password
            theirs=-0.1234,
            ours=-0.4321,
            note=HOSTILE,
        )
        for place in range(5)
    ),
    correction="multiply by 0.7, and normalise",
)
FAILING: Final = AuditReport.from_dict(
    PASSING.to_dict()
    | {"findings": (FAULT, *PASSING.findings), "worst_nats": 2.31, "server": HOSTILE, "model": HOSTILE}
)
CONFORMING: Final = ConformanceReport(
    endpoint="http://127.0.0.1:8000",
    model="m",
    server=HOSTILE,
    requests=80,
    fields={"chat.logprobs (whole)": "applied", "chat.n (whole)": "refused: 400: no such field"},
    findings=PASSING.findings,
)
NONCONFORMING: Final = replace(
    CONFORMING,
    findings=(
        Finding(kind="text-wrong", severity="fault", title="Texts of other tokens.", count=25, of=25),
        Finding(kind="ignored", severity="fault", title="Fields are ignored: chat.seed.", count=1, of=9),
        *PASSING.findings,
    ),
)
