"""No import cycles between files, direct or indirect; imports under TYPE_CHECKING count."""

from __future__ import annotations

import ast
from pathlib import Path

import logprobe

ROOT = Path(logprobe.__file__).parent


def modules(root: Path) -> dict[str, Path]:
    """Return dotted module names → files of a package; an `__init__` has its folder's name."""
    names = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(path: Path, known: dict[str, Path], package: str) -> set[str]:
    """Return the known modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            of_package = {name for name in submodules if name.removeprefix(f"{package}.") in known}
            found |= of_package | ({str(node.module)} if submodules - of_package else set())
    names = {name.removeprefix(package).removeprefix(".") for name in found}
    return names & known.keys()


def cycles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the groups of modules that can all reach each other."""
    reached: dict[str, set[str]] = {}
    for name, direct in edges.items():
        seen: set[str] = set()
        waiting = [*direct]
        while waiting:
            other = waiting.pop()
            if other not in seen:
                seen.add(other)
                waiting += edges[other]
        reached[name] = seen
    groups = (
        frozenset({name, *(other for other in seen if name in reached[other])})
        for name, seen in reached.items()
    )
    return {group for group in groups if len(group) > 1}


def test_no_files_import_each_other() -> None:
    known = modules(ROOT)
    edges = {name: imported(path, known, "logprobe") - {name} for name, path in known.items()}
    assert cycles(edges) == set()


def test_imports_for_type_checkers_and_within_functions_count(tmp_path: Path) -> None:
    files = {
        "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.b import B\n",
        "b.py": "def b():\n    import pack.c\n",
        "c.py": "from pack import a\n",
        "d.py": "from pack.a import A\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    known = modules(tmp_path)
    edges = {name: imported(path, known, "pack") for name, path in known.items()}
    assert edges == {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert cycles(edges) == {frozenset({"a", "b", "c"})}
