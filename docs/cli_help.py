"""Print docs/cli.md: the help of every command, as the command line itself gives it."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from logprobe.cli.app import app, run

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER = """# Command line

Made by `make docs` from the commands' own help. Results go to standard output, talk and progress bars to
standard error; `-` is standard input. Exit codes: 0 all is well, 1 the work failed, 2 wrong use, 130
interrupted. An error is one line, `error: ...`. Flags have no abbreviations.
"""


def page() -> str:
    """The whole page."""
    sections = [f"## logprobe{name}\n\n```text\n{help_of(path)}\n```\n" for name, path in commands()]
    return "\n".join([HEADER, *sections])


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command's name as a heading ends, and its words."""
    pending: list[tuple[list[str], Any]] = [([], typer.main.get_command(app))]
    while pending:
        path, command = pending.pop(0)
        yield "".join(f" {word}" for word in path), path
        below = getattr(command, "commands", {})
        pending[:0] = [([*path, name], inner) for name, inner in below.items()]


def help_of(path: list[str]) -> str:
    """What `logprobe ... --help` prints, 80 columns wide."""
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
    print(page(), end="")
