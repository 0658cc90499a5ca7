from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
SECTIONS = PAGE.split("\n## ")[1:]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0][:40])
def test_a_decision_says_what_why_and_what_was_tried(section: str) -> None:
    assert re.findall(r"^\*\*(.*?)\.\*\* \S", section, re.MULTILINE) == ["Decision", "Why", "What was tried"]


def test_no_decision_carries_a_date() -> None:
    assert re.findall(r"\b20[0-9]{2}\b", PAGE) == []


MEASURED = re.compile(r"\d[\d,.]* ?(?:ms|µs|ns|s|GB/s|GFLOP/s|GMAC/s|nats|tokens a second|per cent|%)(?!\w)")
SCRIPT = re.compile(r"`(benchmarks/\w+\.py)`")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0][:40])
def test_a_measured_figure_stands_beside_the_script_that_prints_it(section: str) -> None:
    for paragraph in section.split("\n\n"):
        assert not MEASURED.search(paragraph) or SCRIPT.search(paragraph), paragraph


def test_every_script_that_the_page_names_is_there() -> None:
    scripts = SCRIPT.findall(PAGE)
    assert len(scripts) > 5
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("takes 1.3 s.", True), ("0.009 nats", True), ("2 slots", False), ("128 MiB", False)],
)
def test_a_figure_is_seen(text: str, expected: bool) -> None:
    assert bool(MEASURED.search(text)) is expected
