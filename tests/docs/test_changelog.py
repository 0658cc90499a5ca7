from __future__ import annotations

import re
from pathlib import Path

import pytest

import logprobe

PAGE = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
SECTIONS = ("Added", "Changed", "Removed", "Fixed")
VERSIONS = PAGE.split("\n## ")[1:]


def test_the_newest_version_is_the_packages() -> None:
    assert VERSIONS[1].splitlines()[0].startswith(f"{logprobe.__version__} - ")


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.splitlines()[0])
def test_a_version_has_each_section_once_and_in_order(version: str) -> None:
    sections = re.findall(r"^### (.*)$", version, re.MULTILINE)
    assert sections == [name for name in SECTIONS if name in sections]
