"""docs/way-of-the-data.md against the calls that a text, a token and a chat really make, on all threads."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import openai
import pytest

from logprobe import LLM, SamplingParams
from logprobe.cli.app import run
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "logprobe"
FILES = {str(path): str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")}
PAGE = (ROOT / "docs" / "way-of-the-data.md").read_text(encoding="utf-8")
HOP = re.compile(r"^\d+\. `(?P<file>[^:`]+):(?P<function>[^`]+)` (?P<sentence>.+)$", re.MULTILINE)
ROW = re.compile(
    r"^\| (?P<title>One [^|]+) \| (?P<files>[\d,]+) \| (?P<lines>[\d,]+) \| (?P<run>[\d,]+) \|$", re.MULTILINE
)
TITLES = ("One scored text", "One generated token", "One streamed chat")
# Of the page's figure: what a Python of another version counts otherwise, and what need not be written down.
MORE, LESS = 1.05, 0.9
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=2)
DRAWN = SamplingParams(max_tokens=1, logprobs=2)


class Watch:
    """The calls of this project's functions in threads that started within the watch, while it is on."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []
        self._is_on = False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Bodies of modules and classes run at an import, which is no part of the way.
        if (
            self._is_on
            and event == "call"
            and code.co_filename in FILES
            and code.co_flags & inspect.CO_OPTIMIZED
        ):
            self.calls.append(code)

    def of(self, work: Callable[[], object]) -> list[CodeType]:
        """All calls of a piece of work, in order."""
        self.calls, self._is_on = [], True
        sys.setprofile(self.note)
        try:
            work()
        finally:
            sys.setprofile(None)
            self._is_on = False
        return self.calls


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        # What is looked after now and then, by the clock, is on no way.
        for check in ("engine.backends.thread.CHECK_AFTER_IDLE_S", "server.http.sse.CHECK_EVERY_S"):
            patch.setattr(f"logprobe.{check}", 3600.0)
        threading.setprofile(watch.note)
        yield watch
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def walked(watch: Watch, tiny_model_folder: Path, new_serving: Any) -> dict[str, list[CodeType]]:
    """What each way calls once all is loaded and the way has been gone before."""
    walked = {}
    # `auto` would choose the layout of the weights by the clock.
    with LLM(str(tiny_model_folder), kv_bytes=1 << 21, weights="packed") as llm:

        def score(text: str) -> None:
            llm.generate([text], SCORED, progress=False)

        def draw(text: str) -> None:
            llm.generate([text], DRAWN, progress=False)

        with (
            new_serving(llm, ServerSettings(model_name="tiny")) as (url, _),
            openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        ):
            for title, work in zip(TITLES, (score, draw, chatter(client)), strict=True):
                work(f"{title}, to load what is loaded late")
                walked[title] = watch.of(lambda work=work, title=title: work(f"and {title}"))
    return walked


def chatter(client: openai.OpenAI) -> Callable[[str], None]:
    """What streams a chat of three tokens with OpenAI's own client."""

    def chat(text: str) -> None:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": text}],
            max_tokens=3,
            stream=True,
            logprobs=True,
            top_logprobs=2,
        )
        assert sum(bool(chunk.choices) for chunk in stream) > 1

    return chat


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


def own_lines(code: CodeType) -> set[tuple[str, int]]:
    """The lines of a function that hold code, with those of the functions within it."""
    lines = {(code.co_filename, line) for _, _, line in code.co_lines() if line is not None}
    return lines.union(*(own_lines(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def figures(calls: list[CodeType]) -> dict[str, int]:
    """Files with a function that ran, their lines, and the lines of the functions that ran."""
    files = {code.co_filename for code in calls}
    return {
        "files": len(files),
        "lines": sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files),
        "run": len(set().union(*map(own_lines, set(calls)))),
    }


def first_not_in_order(wanted: list[str], calls: list[str]) -> str | None:
    """The first of `wanted` that no call after its predecessors' is."""
    remaining = iter(calls)
    return next((hop for hop in wanted if hop not in remaining), None)


def assert_in_order(title: str, calls: list[CodeType]) -> None:
    wanted = [f"{hop['file']}:{hop['function']}" for hop in hops(title)]
    seen = [f"{FILES[code.co_filename]}:{code.co_qualname}" for code in calls]
    assert first_not_in_order(wanted, seen) is None


@pytest.mark.parametrize("title", TITLES)
def test_each_way_is_at_most_12_hops_of_one_sentence(title: str) -> None:
    steps = hops(title)
    assert 8 <= len(steps) <= 12
    for step in steps:
        assert re.fullmatch(r"[^.]+(\.\w[^.]*)*\.", step["sentence"]), step["sentence"]


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
def test_a_way_opens_and_runs_no_more_than_the_page_says(
    title: str, walked: dict[str, list[CodeType]]
) -> None:
    told = {row["title"]: row for row in ROW.finditer(PAGE)}[title]
    counted = figures(walked[title])
    row = f"| {title} | {counted['files']} | {counted['lines']:,} | {counted['run']:,} |"
    opened = " ".join(sorted({FILES[code.co_filename] for code in walked[title]}))
    for name, count in counted.items():
        figure = int(told[name].replace(",", ""))
        assert count <= figure * MORE, f"the way is longer: {row} in place of {told[0]}; it opens {opened}"
        assert count >= figure * LESS, f"the way is shorter, and the page may say so: {row}"


def test_a_wrong_order_is_seen() -> None:
    assert first_not_in_order(["a", "b"], ["b", "a", "c"]) == "b"
    assert first_not_in_order(["a", "b"], ["a", "c", "b"]) is None


def test_a_longer_way_is_seen(walked: dict[str, list[CodeType]]) -> None:
    calls = walked["One generated token"]
    longer = figures([*calls, Watch.of.__code__])
    assert longer["files"] == figures(calls)["files"] + 1
    assert longer["run"] > figures(calls)["run"]
