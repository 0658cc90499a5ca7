"""Read the text for a command from an argument, a file or standard input.

Newlines in a text are not translated, and a byte order mark is kept.
"""

from __future__ import annotations

import codecs
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from logprobe.analysis.io.sources import STDIN, SUFFIXES
from logprobe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["STDIN", "TextOption", "TextSource", "holds_rows", "read_text", "source_of", "text_parts"]

TextOption = Annotated[
    str | None, typer.Option("--text", help="Text to use instead of a file.", rich_help_panel="Input")
]

PART_BYTES = 1 << 18


def read_text(name: str) -> str:
    """Return the text in a file, or in standard input if `name` is `-`; raises the errors of `text_parts`."""
    return "".join(text_parts(name))


def text_parts(name: str) -> Iterator[str]:
    """Yield the text in a file, or in standard input if `name` is `-`, in parts.

    Raises:
        InputError: the text cannot be read, is not UTF-8, or is empty.
    """
    title = "standard input" if name == STDIN else name
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_read, is_end = 0, False
    with _reading(name), nullcontext(sys.stdin.buffer) if name == STDIN else Path(name).open("rb") as file:
        while not is_end:
            data = file.read(PART_BYTES)
            # A short read from a buffered file means the end; reading on would need a second Ctrl-D.
            num_read, is_end = num_read + len(data), len(data) < PART_BYTES
            try:
                text = decoder.decode(data, final=is_end)
            except UnicodeDecodeError as error:
                # `error.object` begins with the incomplete bytes of the previous part.
                place, byte = num_read - len(error.object) + error.start, error.object[error.start]
                raise InputError(
                    f"{title}: is not UTF-8 text (byte 0x{byte:02x} at byte {place}); convert it first, "
                    "for example with iconv -t UTF-8"
                ) from error
            if text:
                yield text
    if not num_read:
        raise _empty(title)


@dataclass(frozen=True, slots=True)
class TextSource:
    """A text of any length."""

    parts: Iterator[str]  # the text in parts, which can be read once
    num_bytes: int | None  # None if not known


def source_of(file: str | None, text: str | None) -> TextSource:
    """Return the text in a file or the value of `--text`.

    Raises:
        BadParameter: both are given, or neither.
        InputError: the text is empty or cannot be read.
    """
    if (file is None) == (text is None):
        raise typer.BadParameter("give either a file (-: standard input) or --text", param_hint="FILE")
    if text is not None:
        if not text:
            raise _empty("--text")
        return TextSource(iter([text]), len(text.encode("utf-8", "surrogatepass")))
    assert file is not None
    path = Path(file)
    parts = text_parts(file)
    begun = chain([next(parts)], parts)  # reads the first part now: most errors come before a model is loaded
    return TextSource(begun, path.stat().st_size if file != STDIN and path.is_file() else None)


def holds_rows(name: str) -> bool:
    """Return True if a name denotes data set rows rather than a text: .jsonl file, folder or glob pattern."""
    path = Path(name)
    is_of_rows = SUFFIXES.get(path.suffix.lower(), "txt") != "txt"
    return is_of_rows or path.is_dir() or (name != STDIN and not path.exists() and "*" in name)


def _empty(title: str) -> InputError:
    return InputError(f"{title}: is empty; at least one character is required")


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{name}: no such file; use a text file, or - for standard input") from error
    except IsADirectoryError as error:
        raise InputError(f"{name}: is a folder; use a text file in it") from error
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name}: cannot be read ({reason}); use another file") from error
