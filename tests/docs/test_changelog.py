from __future__ import annotations

from pathlib import Path

import logprobe

PAGE = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_newest_version_is_that_of_the_package() -> None:
    newest = PAGE.split("\n## ")[1]
    assert newest.startswith(f"{logprobe.__version__} - ")
