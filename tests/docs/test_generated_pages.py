"""The generated pages match the output of their scripts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = {
    "cli.md": "cli_help.py",
    "dependencies.md": "dependencies.py",
    "errors.md": "errors_page.py",
    "models.md": "models_page.py",
    "reliability.md": "reliability_page.py",
}


def load(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), DOCS / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", SCRIPTS)
def test_a_page_is_what_its_script_prints(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == load(SCRIPTS[page]).page(), "run `make docs`"


def test_every_requirement_has_a_purpose() -> None:
    dependencies = load("dependencies.py")
    required = {
        dependencies.parts(requirement)[0]
        for requirements in dependencies.requirements().values()
        for requirement in requirements
    }
    assert required == set(dependencies.USED_FOR)
