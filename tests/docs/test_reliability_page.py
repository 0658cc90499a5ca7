from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_says_the_limits_and_figures_of_now() -> None:
    spec = importlib.util.spec_from_file_location("reliability_page", DOCS / "reliability_page.py")
    assert spec is not None
    assert spec.loader is not None
    reliability_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reliability_page)
    assert (DOCS / "reliability.md").read_text(encoding="utf-8") == reliability_page.page(), "run `make docs`"
