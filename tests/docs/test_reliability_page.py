from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.server import ServerSettings
from logprobe.server.app import ROUTES
from logprobe.server.limits import limit_table

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def reliability_page() -> ModuleType:
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location("reliability_page", DOCS / "reliability_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_the_limits_and_figures_of_now(reliability_page: Any) -> None:
    assert (DOCS / "reliability.md").read_text(encoding="utf-8") == reliability_page.page(), "run `make docs`"


def test_every_route_is_audited_and_no_other(reliability_page: Any) -> None:
    audited = {one for row in reliability_page.AUDIT for one in row.what if not one.startswith("any path")}
    assert audited == {f"{method} {path}" for method, path, _ in ROUTES} | {"GET /openapi.json"}


def test_every_bound_that_the_audit_names_is_a_setting_or_a_limit(reliability_page: Any) -> None:
    known = {*ServerSettings.__dataclass_fields__, *limit_table(ServerSettings())}
    for row in reliability_page.AUDIT:
        assert known >= set(re.findall("`([^`]*)`", row.bounds)), row.what


def test_every_test_that_the_audit_names_exists(reliability_page: Any) -> None:
    for row in reliability_page.AUDIT:
        assert row.shown, row.what
        for file, name in (one.split("::") for one in row.shown):
            tree = ast.parse((ROOT / reliability_page.TESTS / file).read_text(encoding="utf-8"))
            assert name in {part.name for part in tree.body if isinstance(part, ast.FunctionDef)}, file
