"""Links, scripts and make targets named in the pages exist, and nothing names its author's machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

from generated import fill  # noqa: E402 - the scripts of docs/ are no package

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
}
FOLDERS = (".ci", ".github", "benchmarks", "deploy", "docs", "examples")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings and of the names of the Python reference."""
    names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title)).lower() for title in titles} | set(names)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", PAGES[page]):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path = folder / target if target else ROOT / page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(fill(path.read_text(encoding="utf-8"))), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_every_script_of_a_page_exists(page: str) -> None:
    scripts = re.findall(r"(?<![\w/])(?:benchmarks|docs|examples)/\w+\.py\b", PAGES[page])
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_every_make_target_of_the_pages_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*)(?: [a-z0-9- ]+)?:(?!=)", makefile, re.MULTILINE))
    named = set(
        re.findall(r"(?:`|^)(?:\w+=\S+ )?make ([a-z][a-z0-9-]*)", "\n".join(PAGES.values()), re.MULTILINE)
    )
    assert {"demo", "test"} <= named
    assert named - targets == set()


def test_no_file_names_the_machine_or_the_registry_of_its_author() -> None:
    elsewhere = re.compile(
        r"(?<![\w.$%~}])/(?:wo" + r"rk|ho" + r"me|ro" + r"ot)/|py" + r"pi\.org|python" + r"hosted\.org"
    )
    files = [
        *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*")),
        *(file for folder in ("src", "tests") for file in (ROOT / folder).rglob("*.py")),
        *(file for file in ROOT.iterdir() if file.suffix in {".md", ".toml", ".yml"}),
    ]
    texts = [file for file in files if file.is_file() and file.suffix not in {".png", ".pyc"}]
    assert ROOT / "README.md" in texts
    names = [str(file.relative_to(ROOT)) for file in texts if elsewhere.search(file.read_text("utf-8"))]
    assert names == []
