from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

from logprobe import errors

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "errors.md").read_text(encoding="utf-8")
CLASSES = {
    name: item for name, item in vars(errors).items() if inspect.isclass(item) and issubclass(item, Exception)
}


def test_the_page_is_what_the_classes_say() -> None:
    spec = importlib.util.spec_from_file_location("errors_page", DOCS / "errors_page.py")
    assert spec is not None
    assert spec.loader is not None
    errors_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(errors_page)
    assert errors_page.page() == PAGE, "run `make docs`"


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_stands_there_with_its_remedy(name: str) -> None:
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert "**Remedy:** " in section
