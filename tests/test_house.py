"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_IMPORT_S = 0.3


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def is_swallowed(handler: ast.ExceptHandler) -> bool:
    """Whether a handler does nothing, or names no exception."""
    does_nothing = all(
        isinstance(step, ast.Pass) or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))
        for step in handler.body
    )
    return does_nothing or handler.type is None


def test_the_project_speaks_of_itself_alone() -> None:
    # Neither folders of the machine that it was written on, nor hosts for which a reader has others.
    elsewhere = re.compile(
        r"(?<![\w.$%~}])/(?:wo" + r"rk|ho" + r"me|ro" + r"ot)/|py" + r"pi\.org|python" + r"hosted\.org"
    )
    folders = ("docs", "deploy", "examples", "benchmarks", ".ci", ".github")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    files += [*SOURCES, *TESTS, *(file for file in ROOT.iterdir() if file.suffix in {".md", ".toml", ".yml"})]
    texts = [file for file in files if file.suffix != ".png" and "__pycache__" not in file.parts]
    texts = [file for file in texts if file.is_file()]
    assert ROOT / "README.md" in texts
    assert [name(file) for file in texts if elsewhere.search(file.read_text("utf-8"))] == []


def test_no_exception_is_swallowed() -> None:
    swallowed = [
        f"{name(path)}:{node.lineno}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and is_swallowed(node)
    ]
    assert swallowed == []


def test_one_file_alone_makes_requests() -> None:
    makers = {
        name(path)
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Request"
    }
    assert makers == {"src/logprobe/engine/request.py"}


@pytest.mark.parametrize(
    ("body", "expected"), [("pass", True), ("...", True), ("'why not'", True), ("raise", False)]
)
def test_a_swallowed_exception_is_seen(body: str, expected: bool) -> None:
    (tried,) = ast.parse(f"try:\n  f()\nexcept ValueError:\n  {body}").body
    assert isinstance(tried, ast.Try)
    assert is_swallowed(tried.handlers[0]) is expected


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("logprobe", ["torch", "transformers", "tokenizers", "pyarrow", "numpy", "rich"]),
        ("logprobe.records", ["torch", "transformers", "pyarrow"]),
        ("logprobe.cli", ["torch", "transformers", "pyarrow"]),
        ("logprobe.engine.backends.thread", ["logprobe.compat"]),
        ("logprobe.engine.engine", ["logprobe.compat"]),
        ("logprobe.transport.channel", ["logprobe.compat"]),
    ],
)
def test_a_light_module_loads_nothing_heavy(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    assert in_new_process(code) == "[]"


def test_import_logprobe_is_quick() -> None:
    # The processor's time, and the best of some: what else the machine does is not the import's.
    code = "import time; start = time.process_time(); import logprobe; print(time.process_time() - start)"
    assert min(float(in_new_process(code)) for _ in range(5)) < MAX_IMPORT_S


def in_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()
