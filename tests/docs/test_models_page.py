from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_the_table_that_the_families_prove() -> None:
    spec = importlib.util.spec_from_file_location("models_page", DOCS / "models_page.py")
    assert spec is not None
    assert spec.loader is not None
    models_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models_page)
    assert (DOCS / "models.md").read_text(encoding="utf-8") == models_page.page(), "run `make docs`"
