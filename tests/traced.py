"""The calls of this project that a text, a token and a chat make, on all threads.

`python tests/traced.py` prints the table of docs/way-of-the-data.md.
"""

from __future__ import annotations

import inspect
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType
from typing import TYPE_CHECKING, Any

import openai
import pytest

from logprobe import LLM, SamplingParams
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SOURCE = Path(__file__).parents[1] / "src" / "logprobe"
FILES = {str(path): str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")}
TITLES = ("One scored text", "One generated token", "One streamed chat")
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


@contextmanager
def watching() -> Iterator[Watch]:
    """A watch over the threads that start before it ends."""
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        # What is looked after now and then, by the clock, is on no way.
        for check in ("engine.backends.thread.CHECK_AFTER_IDLE_S", "server.http.replies.CHECK_EVERY_S"):
            patch.setattr(f"logprobe.{check}", 3600.0)
        threading.setprofile(watch.note)
        yield watch
        threading.setprofile(None)  # type: ignore[arg-type]


def walk(watch: Watch, model: Path, serving: Any) -> dict[str, list[CodeType]]:
    """What each way calls once all is loaded and the way has been gone before."""
    walked = {}
    with LLM(str(model), kv_bytes=1 << 21) as llm:

        def score(text: str) -> None:
            llm.generate([text], SCORED, progress=False)

        def draw(text: str) -> None:
            llm.generate([text], DRAWN, progress=False)

        with (
            serving(llm, ServerSettings(model_name="tiny")) as (url, _),
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
            temperature=0.0,  # a drawn token may end the chat before its first entry
            stream=True,
            logprobs=True,
            top_logprobs=2,
        )
        assert sum(bool(chunk.choices) for chunk in stream) > 1

    return chat


def own_lines(code: CodeType) -> set[tuple[str, int]]:
    """The lines of a function that hold code, with those of the functions within it."""
    lines = {(code.co_filename, line) for _, _, line in code.co_lines() if line is not None}
    return lines.union(*(own_lines(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def row(title: str, calls: list[CodeType]) -> str:
    """Files with a function that ran, all their lines, and the lines of the functions that ran."""
    files = {code.co_filename for code in calls}
    lines = sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files)
    run = len(set().union(*map(own_lines, set(calls))))
    return f"| {title} | {len(files)} | {lines:,} | {run:,} |"


def table(walked: dict[str, list[CodeType]]) -> str:
    """The ways and what a newcomer opens on each."""
    head = ["| way | files | their lines | lines of the functions that run |", "|---|---|---|---|"]
    return "\n".join([*head, *(row(title, calls) for title, calls in walked.items())])


if __name__ == "__main__":
    from conftest import save_tiny_llama, serving

    with TemporaryDirectory() as folder, watching() as watch:
        print(table(walk(watch, save_tiny_llama(Path(folder)), serving)))  # noqa: T201
