from __future__ import annotations

import re
from pathlib import Path

import pytest

import logprobe

PAGE = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
SECTIONS = ("Added", "Changed", "Removed", "Fixed")
VERSIONS = PAGE.split("\n## ")[1:]


def test_a_version_is_to_come_and_all_others_have_a_number_and_a_day() -> None:
    first, *others = (version.splitlines()[0] for version in VERSIONS)
    assert first == "Unreleased"
    assert all(re.fullmatch(r"\[?\d+\.\d+\.\d+\]? - \d{4}-\d{2}-\d{2}", title) for title in others)


def test_the_newest_version_is_the_packages() -> None:
    assert VERSIONS[1].splitlines()[0].startswith(f"{logprobe.__version__} - ")


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.splitlines()[0])
def test_a_version_has_each_section_once_and_in_order(version: str) -> None:
    sections = re.findall(r"^### (.*)$", version, re.MULTILINE)
    assert sections == [name for name in SECTIONS if name in sections]


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.splitlines()[0])
def test_a_section_is_a_list_of_different_lines(version: str) -> None:
    told, *sections = version.split("\n### ")
    assert not told.partition("\n")[2].strip(), "a change stands in a section"
    for section in sections:
        lines = section.splitlines()[1:]
        items = [line for line in lines if line.startswith("- ")]
        assert items
        assert len(items) == len(set(items))
        assert all(line.startswith(("- ", "  ")) for line in lines if line)
