"""docs/structures.md and docs/way-of-the-data.md against the calls that a text, a token and a chat make."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.cli.app import run
from traced import FILES, SOURCE, TITLES, Watch, row, table, walk, watching

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

# What none of these requests asks for.
NOT_ASKED = (
    "engine/forward/experts.py",
    "engine/forward/lora.py",
    "engine/forward/rope.py",
    "engine/loras.py",
    "engine/plan/drafts.py",
    "engine/truncation.py",
    "engine/weight_swap.py",
    "processors/arguments.py",
    "processors/pipeline.py",
    "records/store/inputs.py",
    "records/store/side.py",
    "records/store/texts.py",
    "sampling/kept.py",
    "server/members.py",
    "server/openai/tools.py",
    "text/channels/split.py",
    "text/dropped.py",
    "text/reasoning.py",
    "text/tools.py",
)
DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("way-of-the-data.md", "structures.md"))
HOP = re.compile(r"^\d+\. `(?P<file>[^:`]+):(?P<function>[^`]+)`", re.MULTILINE)


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    with watching() as watch:
        yield watch


@pytest.fixture(scope="module")
def walked(watch: Watch, tiny_model_folder: Path, new_serving: Any) -> dict[str, list[CodeType]]:
    return walk(watch, tiny_model_folder, new_serving)


def hops(title: str) -> list[re.Match[str]]:
    (section,) = [part for part in PAGE.split("\n## ") if part.startswith(title)]
    return list(HOP.finditer(section))


def functions(path: Path) -> Iterator[str]:
    """The qualified names of the functions and methods of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}"


def first_not_in_order(wanted: list[str], calls: list[str]) -> str | None:
    """The first of `wanted` that no call after its predecessors' is."""
    remaining = iter(calls)
    return next((hop for hop in wanted if hop not in remaining), None)


def assert_in_order(title: str, calls: list[CodeType]) -> None:
    wanted = [f"{hop['file']}:{hop['function']}" for hop in hops(title)]
    seen = [f"{FILES[code.co_filename]}:{code.co_qualname}" for code in calls]
    assert wanted
    assert first_not_in_order(wanted, seen) is None


@pytest.mark.parametrize("title", TITLES)
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
def test_the_command_calls_in_the_order_of_the_page(
    title: str, arguments: list[str], tiny_model_folder: Path, watch: Watch
) -> None:
    codes: list[int] = []
    calls = watch.of(lambda: codes.append(run([*arguments, "--model", str(tiny_model_folder)])))
    assert codes == [0]
    assert_in_order(title, calls)


def test_a_streamed_chat_calls_in_the_order_of_the_page(walked: dict[str, list[CodeType]]) -> None:
    assert_in_order("One streamed chat", walked["One streamed chat"])


@pytest.mark.parametrize("title", TITLES)
def test_what_a_request_does_not_ask_for_is_not_on_its_way(
    title: str, walked: dict[str, list[CodeType]]
) -> None:
    assert all((SOURCE / file).is_file() for file in NOT_ASKED)
    assert {FILES[code.co_filename] for code in walked[title]}.isdisjoint(NOT_ASKED)


def test_a_wrong_order_is_seen() -> None:
    assert first_not_in_order(["a", "b"], ["b", "a", "c"]) == "b"
    assert first_not_in_order(["a", "b"], ["a", "c", "b"]) is None


def test_the_table_that_is_printed_is_the_one_on_the_page_but_for_its_counts(
    walked: dict[str, list[CodeType]],
) -> None:
    assert re.sub(r"[\d,]+", "0", table(walked)) in re.sub(r"[\d,]+", "0", PAGE)


def test_a_file_counts_once_and_the_lines_of_what_runs_in_it() -> None:
    code = first_not_in_order.__code__
    num_lines = len(Path(__file__).read_text(encoding="utf-8").splitlines())
    # The line of its name, and two of its body.
    assert row("way", [code, code]) == f"| way | 1 | {num_lines} | 3 |"
