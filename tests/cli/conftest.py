"""The command line called in this process, on a tiny model or a real model that is loaded once."""

from __future__ import annotations

import io
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from logprobe.cli.app import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe import LLM


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """Return the error line; only progress messages may precede it."""
        assert self.out == ""
        *talk, last = self.err.splitlines()
        assert all(line.startswith("loading ") for line in talk), talk
        assert last.startswith("error: "), last
        return last.removeprefix("error: ")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Call the command line with arguments and bytes as standard input."""

    def call(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run(arguments)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return call


@pytest.fixture
def on_real_llm(real_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands use the session's loaded real model."""

    @contextmanager
    def loaded(**_: object) -> Iterator[LLM]:
        yield real_llm

    monkeypatch.setattr("logprobe.cli.options.open_llm", loaded)
