"""One wrong finding a kind with the counts of all; each note stands by itself."""

from __future__ import annotations

from logprobe.analysis.auditing.findings import Findings
from logprobe.analysis.auditing.report import MAX_EVIDENCE, Evidence


def evidence(theirs: float) -> Evidence:
    return Evidence(ask="echo", prompt="a", position=1, where="prompt", theirs=theirs, ours=0.0)


def test_what_is_found_again_adds_to_its_counts() -> None:
    findings = Findings()
    for worst in (0.25, 0.5, 0.125):
        title = "{count} of {of} rows, up to {worst} nats"
        findings.add("rounded", title, worst=worst, of=2, evidence=[evidence(-worst)] * MAX_EVIDENCE)
    (found,) = findings.listed()
    assert (found.count, found.of, found.worst_nats) == (3, 6, 0.5)
    assert found.title == "3 of 6 rows, up to 0.5 nats"
    assert [one.theirs for one in found.evidence] == [-0.5] * MAX_EVIDENCE
    assert findings.has("bos", "rounded")


def test_notes_of_one_kind_keep_their_titles() -> None:
    findings = Findings()
    for title in ("no echo", "no prompt_logprobs", "no echo"):
        findings.add("form", title, severity="note")
    counts = {one.title: one.count for one in findings.listed()}
    assert counts == {"no echo": 2, "no prompt_logprobs": 1}
    assert not findings.has("form")
