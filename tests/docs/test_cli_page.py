from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_the_commands_own_help() -> None:
    spec = importlib.util.spec_from_file_location("cli_help", DOCS / "cli_help.py")
    assert spec is not None
    assert spec.loader is not None
    cli_help = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cli_help)
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == cli_help.page(), "run `make docs`"
