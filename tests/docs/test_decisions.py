from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")


def test_every_script_that_the_page_names_is_there() -> None:
    scripts = re.findall(r"`(benchmarks/\w+\.py)`", PAGE)
    assert scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
