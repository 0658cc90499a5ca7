"""Count the files and lines that a scored text, a generated token and a streamed chat pass, on all threads.

`PYTHONPATH=tests python benchmarks/traced.py` prints the table of docs/way-of-the-data.md; the tiny model is
the tests'.
"""

from __future__ import annotations

import inspect
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType
from typing import TYPE_CHECKING, Any
from unittest import mock

import openai

from conftest import save_tiny_llama, serving
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


class CallTracer:
    """Record calls of this project's functions in threads that started while `tracing` is open."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []
        self._is_on = False

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        """Add a call; called by the interpreter."""
        code = frame.f_code
        # Bodies of modules and classes run once, at import.
        if (
            self._is_on
            and event == "call"
            and code.co_filename in FILES
            and code.co_flags & inspect.CO_OPTIMIZED
        ):
            self.calls.append(code)

    def calls_of(self, work: Callable[[], object]) -> list[CodeType]:
        """Return the calls that `work` makes, in order."""
        self.calls, self._is_on = [], True
        sys.setprofile(self.record)
        try:
            work()
        finally:
            sys.setprofile(None)
            self._is_on = False
        return self.calls


@contextmanager
def tracing() -> Iterator[CallTracer]:
    """Trace the threads that start before the block ends."""
    tracer = CallTracer()
    with ExitStack() as stack:
        # Periodic checks belong to no request.
        for check in ("engine.backends.thread.CHECK_AFTER_IDLE_S", "server.http.replies.CHECK_EVERY_S"):
            stack.enter_context(mock.patch(f"logprobe.{check}", 3600.0))
        threading.setprofile(tracer.record)
        yield tracer
        threading.setprofile(None)  # type: ignore[arg-type]


def trace(tracer: CallTracer, model: Path) -> dict[str, list[CodeType]]:
    """Return the calls of each request by its title, after a first request of its kind."""
    traced = {}
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
                traced[title] = tracer.calls_of(lambda work=work, title=title: work(f"and {title}"))
    return traced


def chatter(client: openai.OpenAI) -> Callable[[str], None]:
    """Return a function that streams a chat of three tokens with OpenAI's client."""

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
    """Return the lines of a function that hold code, nested functions included."""
    lines = {(code.co_filename, line) for _, _, line in code.co_lines() if line is not None}
    return lines.union(*(own_lines(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def row(title: str, calls: list[CodeType]) -> str:
    """Format the number of files with a function that ran, of their lines, and of these functions' lines."""
    files = {code.co_filename for code in calls}
    lines = sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files)
    run = len(set().union(*map(own_lines, set(calls))))
    return f"| {title} | {len(files)} | {lines:,} | {run:,} |"


def table(traced: dict[str, list[CodeType]]) -> str:
    """Format the table of docs/way-of-the-data.md."""
    head = ["| way | files | their lines | lines of the functions that run |", "|---|---|---|---|"]
    return "\n".join([*head, *(row(title, calls) for title, calls in traced.items())])


if __name__ == "__main__":
    with TemporaryDirectory() as folder, tracing() as tracer:
        print(table(trace(tracer, save_tiny_llama(Path(folder)))))
