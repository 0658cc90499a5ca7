from __future__ import annotations

import ast
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.cli.app import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "logprobe"
PAGE = (ROOT / "docs" / "way-of-the-data.md").read_text(encoding="utf-8")
HOP = re.compile(r"^\d+\. `(?P<file>[^:`]+):(?P<function>[^`]+)` (?P<sentence>.+)$", re.MULTILINE)


def hops(title: str) -> list[re.Match[str]]:
    (section,) = [part for part in PAGE.split("\n## ") if part.startswith(title)]
    return list(HOP.finditer(section))


def functions(path: Path) -> Iterator[str]:
    """The qualified names of the functions and methods of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}"


def visited(arguments: list[str]) -> list[str]:
    """Every call of a function of the package while a command runs, on all threads, in order."""
    calls: list[str] = []
    known = {str(path): str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")}

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = known.get(frame.f_code.co_filename)
        if event == "call" and file is not None:
            calls.append(f"{file}:{frame.f_code.co_qualname}")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        code = run(arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert code == 0
    return calls


def first_not_in_order(wanted: list[str], calls: list[str]) -> str | None:
    """The first of `wanted` that no call after its predecessors' is."""
    remaining = iter(calls)
    return next((hop for hop in wanted if hop not in remaining), None)


@pytest.mark.parametrize("title", ["One scored text", "One generated token"])
def test_each_way_is_at_most_12_hops_of_one_sentence(title: str) -> None:
    found = hops(title)
    assert 8 <= len(found) <= 12
    for hop in found:
        assert re.fullmatch(r"[^.]+(\.\w[^.]*)*\.", hop["sentence"]), hop["sentence"]


@pytest.mark.parametrize("title", ["One scored text", "One generated token"])
def test_every_hop_is_a_function_of_that_file(title: str) -> None:
    for hop in hops(title):
        assert hop["function"] in set(functions(SOURCE / hop["file"])), hop[0]


@pytest.mark.parametrize(
    ("title", "arguments"),
    [
        ("One scored text", ["score", "--text", "the cat and the dog", "--top", "2"]),
        ("One generated token", ["generate", "the cat", "--max-tokens", "1", "--logprobs", "2"]),
    ],
)
def test_the_calls_come_in_the_order_of_the_page(
    title: str, arguments: list[str], tiny_model_folder: Path
) -> None:
    calls = visited([*arguments, "--model", str(tiny_model_folder)])
    wanted = [f"{hop['file']}:{hop['function']}" for hop in hops(title)]
    assert first_not_in_order(wanted, calls) is None


def test_a_wrong_order_is_seen() -> None:
    assert first_not_in_order(["a", "b"], ["b", "a", "c"]) == "b"
    assert first_not_in_order(["a", "b"], ["a", "c", "b"]) is None
