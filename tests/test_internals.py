"""The list of other packages' private names is complete, and all of them still exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import logprobe
from logprobe.internals import INTERNALS, VLLM_PROCESSORS, VLLM_WORKER, Internals

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(logprobe.__file__).parent
# Without the file that the build writes.
SOURCES = [path for path in sorted(ROOT.rglob("*.py")) if path.parent.name != "_native"]
PRIVATE = re.compile(r"torch\.ops\.|\btorch\._|CDLL\((?!None)")
DOCUMENTED = {"_asdict", "_exit", "_fields", "_replace"}  # of named tuples and os
BY_NAME = {"attrgetter", "delattr", "getattr", "hasattr", "setattr"}


def test_no_operator_or_library_is_looked_up_by_a_private_name() -> None:
    found = {
        path.name: line
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").splitlines()
        if PRIVATE.search(line) and '"""' not in line and "`torch._" not in line
    }
    # Tells whether a GPU's driver is installed.
    assert found == {"device.py": "        ctypes.CDLL(library)"}


def owner_of(internals: Internals) -> Any:
    """Return the module or class that has the names."""
    module, _, name = internals.owner.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, name) if name else imported


@pytest.mark.parametrize("internals", INTERNALS, ids=lambda internals: internals.owner)
def test_the_owner_still_has_what_is_used_in_place(internals: Internals) -> None:
    package = internals.owner.partition(":")[0].partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed here; its own tests take this path")
    if package == "vllm":
        pytest.skip("attributes of a running engine; tests/integrations/vllm takes this path")
    owner = owner_of(internals)
    gone = [name for name in internals.names if not hasattr(owner, name) and name not in assigned(owner)]
    assert gone == [], f"{internals.owner} no longer has {gone} ({internals.purpose}); {internals.without}"


@pytest.mark.parametrize("internals", INTERNALS, ids=lambda internals: internals.owner)
def test_every_name_listed_is_used(internals: Internals) -> None:
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in internals.used_in)
    by_path = (*VLLM_WORKER, *VLLM_PROCESSORS)  # these two are named by the files
    names = [name for name in internals.names if name not in by_path]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_the_source_uses_no_private_name_of_another_package_that_is_not_listed() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    own = {name for tree in trees.values() for name in defined(tree)}
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path, tree in trees.items()
        for name in {*foreign_names(tree, own), *inherited_names(tree)}
    }
    listed = {
        (path, name)
        for internals in INTERNALS
        for path in internals.used_in
        for name in internals.names
        if is_private(name)
    }
    assert found == listed


@pytest.mark.parametrize(
    "source",
    [
        "import atexit\natexit._unlisted()",
        "from torch import _unlisted",
        "from torch._unlisted import name",
        "import torch._unlisted.name",
        "import torch\ngetattr(torch, '_unlisted', None)",
        "from operator import attrgetter\nattrgetter('nn._unlisted')",
        "def f(module):\n    return module.inner._unlisted",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert set(foreign_names(ast.parse(source), own=set())) == {"_unlisted"}


def test_a_private_name_of_a_base_class_is_found_also_where_it_is_overridden() -> None:
    tree = ast.parse(
        "from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol\n"
        "class Ours(HttpToolsProtocol):\n"
        "    def __init__(self):\n        self._ours = self._get_upgrade()\n"
        "    def _unsupported_upgrade_warning(self):\n        self._ours = 1\n"
    )
    assert set(inherited_names(tree)) == {"_get_upgrade", "_unsupported_upgrade_warning"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and len(name) > 1 and name not in DOCUMENTED


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("", "logprobe")


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield private names that one of our files defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) if isinstance(
                node, ast.Name
            ) or is_self(node.value):
                yield name


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Yield private names that a file takes from elsewhere; `own` are those of our classes and modules."""
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(module=module, names=aliases, level=0) if not is_ours(module or ""):
                names = [*(module or "").split("."), *(alias.name for alias in aliases)]
            case ast.Import(names=aliases):
                taken = [alias.name for alias in aliases if not is_ours(alias.name)]
                names = [part for name in taken for part in name.split(".")]
            case ast.Call(func=ast.Name(id=called), args=arguments) if called in BY_NAME:
                texts = [one.value for one in arguments if isinstance(one, ast.Constant)]
                names = [part for text in texts if isinstance(text, str) for part in text.split(".")]
        yield from (name for name in names if is_private(name) and name not in own)


def inherited_names(tree: ast.Module) -> Iterator[str]:
    """Yield private names of foreign base classes that our classes use or override."""
    modules = {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        used = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and is_self(one.value)}
        used |= {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        private = {name for name in used if is_private(name)}
        bases = [one.id for one in node.bases if isinstance(one, ast.Name)]
        for base in bases if private else ():
            module = modules.get(base, "")
            if is_ours(module) or find_spec(module.partition(".")[0]) is None:  # extra not installed
                continue
            yield from private & assigned(getattr(importlib.import_module(module), base))


@cache
def assigned(owner: Any) -> frozenset[str]:
    """Return names that a foreign class or its bases define or assign."""
    found: set[str] = set()
    for one in inspect.getmro(owner) if inspect.isclass(owner) else ():
        found |= {*vars(one), *getattr(one, "__annotations__", {})}
        try:
            source = inspect.getsource(one)
        except (OSError, TypeError):  # a compiled module
            continue
        found |= set(re.findall(r"\bself\.(\w+)\b[^=\n]*=[^=]", source))
    return frozenset(found)
