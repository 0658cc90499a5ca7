"""The Python reference lists every public name, and the site's menu lists every page."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "reference").glob("*.md")))
NAMED = set(re.findall(r"^::: (logprobe\.[\w.]+)$", TEXT, re.MULTILINE))
# Documented on the index page and on the page of errors.
ELSEWHERE = {"logprobe.__version__", "logprobe.LogprobeError"}
MODULES = ["kernels", "processors", "records", "sampling", "analysis", "testing", "transport", "next_token"]


def public(module: str) -> dict[str, Any]:
    found = importlib.import_module(module)
    return {f"{module}.{name}": getattr(found, name) for name in found.__all__}


@pytest.mark.parametrize("module", ["logprobe", *(f"logprobe.{name}" for name in MODULES)])
def test_every_public_name_is_in_the_reference(module: str) -> None:
    # Names that the root package also exports are documented there.
    root = {id(value) for value in public("logprobe").values()} if module != "logprobe" else set()
    missing = {
        name
        for name, value in public(module).items()
        if name not in NAMED | ELSEWHERE and id(value) not in root
    }
    assert missing == set(), "add `::: NAME` to a page of docs/reference"


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_name_of_the_reference_is_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    found = importlib.import_module(module)
    assert hasattr(found, attribute) or importlib.import_module(name)


def pages_of(menu: Any) -> list[str]:
    """Return the pages of a menu or submenu."""
    if isinstance(menu, str):
        return [menu]
    parts = menu.values() if isinstance(menu, dict) else menu
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages - set(pages_of(menu)) == set(), "add it to `nav` of mkdocs.yml"
