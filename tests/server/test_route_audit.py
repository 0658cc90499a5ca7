"""Every route states its cost, its bounds, and existing tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from logprobe.server import ServerSettings
from logprobe.server.app import ROUTES
from logprobe.server.limits import limit_table
from route_audit import AUDIT, TESTS

ROOT = Path(__file__).parents[2]


def test_every_route_is_audited_and_no_other() -> None:
    audited = {route for row in AUDIT for route in row.what if not route.startswith("any path")}
    assert audited == {f"{method} {path}" for method, path, _ in ROUTES}


def test_every_bound_is_a_setting_or_a_limit() -> None:
    known = {*ServerSettings.__dataclass_fields__, *limit_table(ServerSettings())}
    for row in AUDIT:
        assert known >= set(re.findall("`([^`]*)`", row.bounds)), row.what


def test_every_test_of_the_audit_exists() -> None:
    for row in AUDIT:
        assert row.shown, row.what
        for file, name in (shown.split("::") for shown in row.shown):
            tree = ast.parse((ROOT / TESTS / file).read_text(encoding="utf-8"))
            assert name in {part.name for part in tree.body if isinstance(part, ast.FunctionDef)}, file
