"""docs/audit.md: its example runs, it explains every finding; docs/dev/audits.md: it is of the newest run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from doc_pages import PAGES, examples_of, run_examples
from logprobe.analysis.auditing.report import KINDS
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from logprobe import LLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = PAGES["audit.md"]


@pytest.fixture
def audit_servers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that writes the tables."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), str(BENCHMARKS / "rivals"), *sys.path])
    import audit_servers

    return audit_servers


def test_the_example_runs(
    tiny_llm: LLM, tiny_model_folder: Path, new_serving: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with new_serving(tiny_llm, ServerSettings(model_name="tiny")) as (url, _):
        run_examples("audit.md", examples_of("audit.md"), model=tiny_model_folder, url=url)
    assert capsys.readouterr().out.startswith("PASS ")


def test_every_finding_is_explained_and_no_other() -> None:
    section = PAGE.split("## What a finding means")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([a-z-]+)`", " ".join(cells))) == sorted(KINDS)


def test_the_tables_are_those_of_the_newest_run(audit_servers: Any) -> None:
    content = audit_servers.newest_results()[audit_servers.BENCH]
    page = PAGES["dev/audits.md"]
    assert f"{audit_servers.BEGIN}\n{audit_servers.tables(content)}\n{audit_servers.END}" in page


def test_a_server_that_could_not_be_run_is_listed_with_the_reason(audit_servers: Any) -> None:
    outcome = audit_servers.Outcome(
        name="a server", version="1.2", note="it has no logprobs", day="2026-01-01"
    )
    assert audit_servers.line_of(outcome)[:2] == ("a server (1.2)", "not run")
    assert outcome.note in audit_servers.section_of(outcome)
