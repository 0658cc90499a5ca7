"""docs/dependencies.md says what pyproject.toml asks for, and what each is for."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_that_of_now_and_names_no_more() -> None:
    spec = importlib.util.spec_from_file_location("dependencies", DOCS / "dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "dependencies.md").read_text(encoding="utf-8") == module.page(), "run `make docs`"
    named = {module.parts(one)[0] for listed in module.requirements().values() for one in listed}
    assert named == set(module.USED_FOR)
