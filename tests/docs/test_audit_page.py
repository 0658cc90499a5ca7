"""docs/audit.md: its example runs, and it explains every finding."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from doc_pages import PAGES, examples_of, run_examples
from logprobe.scoring.auditing.report import KINDS
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from logprobe import LLM

PAGE = PAGES["audit.md"]


def test_the_example_runs(
    tiny_llm: LLM, tiny_model_folder: Path, new_serving: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with new_serving(tiny_llm, ServerSettings(model_name="tiny")) as (url, _):
        run_examples("audit.md", examples_of("audit.md"), model=tiny_model_folder, url=url)
    assert capsys.readouterr().out.startswith("True ")


def test_every_finding_is_explained_and_no_other() -> None:
    section = PAGE.split("## What a finding means")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([a-z-]+)`", " ".join(cells))) == sorted(KINDS)
