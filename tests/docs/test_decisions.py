from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "decisions.md").read_text(encoding="utf-8")
SECTIONS = PAGE.split("\n## ")[1:]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0][:40])
def test_a_decision_says_what_why_and_what_was_tried(section: str) -> None:
    assert re.findall(r"^\*\*(.*?)\.\*\* \S", section, re.MULTILINE) == ["Decision", "Why", "What was tried"]


def test_no_decision_carries_a_date() -> None:
    assert re.findall(r"\b20[0-9]{2}\b", PAGE) == []
