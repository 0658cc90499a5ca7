"""Print the help of every command as Markdown, for docs/cli.md."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from logprobe.cli.app import make_app, run

if TYPE_CHECKING:
    from collections.abc import Iterator


def text() -> str:
    """Return a section with the help of each command."""
    sections = [f"## logprobe{name}\n\n```text\n{help_of(path)}\n```\n" for name, path in commands()]
    return "\n".join(sections)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the end of each command's heading, and its words."""
    pending: list[tuple[list[str], Any]] = [([], typer.main.get_command(make_app()))]
    while pending:
        path, command = pending.pop(0)
        yield "".join(f" {word}" for word in path), path
        below = getattr(command, "commands", {})
        pending[:0] = [([*path, name], inner) for name, inner in below.items()]


def help_of(path: list[str]) -> str:
    """Return the output of `logprobe ... --help` in a terminal of 80 columns."""
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        with redirect_stdout(io.StringIO()) as out:
            run([*path, "--help"])
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip()


if __name__ == "__main__":
    print(text(), end="")
