"""The files and functions named on the pages of docs/dev exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "logprobe"
DEV = ROOT / "docs" / "dev"
SUFFIXES = (".py", ".md", ".json", ".toml")
ELSEWHERE = ("/", ".venv/", "site/")  # routes and files of the system, or made by a build


def paths_of(page: str) -> list[str]:
    """Return the paths, with the names behind their colons, that a page sets as code outside of blocks."""
    text = re.sub(r"```.*?```", "", (DEV / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    words = {word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()}
    paths = {word for word in words if "/" in word or word.partition(":")[0].endswith(SUFFIXES)}
    return sorted(path for path in paths if not path.startswith(ELSEWHERE) and not {"*", "<"} & set(path))


@cache
def names_of(path: Path) -> set[str]:
    """Return the functions, classes, class members and constants of a Python file."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names |= defined(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for member in node.body for name in defined(member)}
    return names


def defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign):
        return {ast.unparse(node.target)}
    return {ast.unparse(target) for target in node.targets} if isinstance(node, ast.Assign) else set()


@pytest.mark.parametrize("page", sorted(path.name for path in DEV.glob("*.md")))
def test_every_path_and_the_name_behind_its_colon_exist(page: str) -> None:
    words = paths_of(page)
    assert words
    for word in words:
        path, _, name = word.partition(":")
        files = [top / path for top in (SOURCE, ROOT) if (top / path).exists()]
        assert files, word
        assert not name or name in names_of(files[0]), word
