from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")


def test_every_script_that_the_page_names_is_there() -> None:
    scripts = re.findall(r"`(benchmarks/\w+\.py)`", PAGE)
    assert scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_the_contents_list_the_entries_in_their_order() -> None:
    contents, _, entries = PAGE.partition("\n## ")
    titles = re.findall(r"^### (.+)$", entries, re.MULTILINE)
    anchors = [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title)).lower() for title in titles]
    assert len(titles) > 1
    assert re.findall(r"\]\(#([^)]+)\)", contents) == anchors
