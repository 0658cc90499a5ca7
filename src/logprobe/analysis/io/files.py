"""JSON Lines, durable writes, and I/O errors that name the file."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logprobe.errors import InputError, LogprobeError, OutputError
from logprobe.private_files import claim, sync
from logprobe.records.forms.finite import finite_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MESSAGE_CHARS = 300  # pyarrow's messages may be pages long


def json_line(row: dict[str, Any]) -> str:
    """Return a row as JSON, with -inf as -9999 and +inf (the perplexity of an impossible text) as null."""
    bounded = {name: None if value == math.inf else value for name, value in row.items()}
    return json.dumps(finite_fields(bounded), ensure_ascii=False)


@contextmanager
def reading(path: str | Path, remedy: str = "use another file") -> Iterator[None]:
    """Convert exceptions from damaged or unreadable files to an `InputError` that names the file."""
    try:
        yield
    except LogprobeError:
        raise
    except _unreadable() as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise InputError(f"{path}: cannot be read ({reason:.{_MESSAGE_CHARS}}); {remedy}") from error


def read_limited(path: str | Path, max_bytes: int, remedy: str) -> bytes:
    """Return the content of a file, pipe or device that has at most `max_bytes`.

    Raises:
        InputError: the file cannot be read, or has more than `max_bytes`.
    """
    with reading(path), Path(path).open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise InputError(f"{path}: has more than {max_bytes} bytes; {remedy}")
    return data


@contextmanager
def writing(path: str | Path, remedy: str = "free disk space, or use another path") -> Iterator[None]:
    """Convert an `OSError` within the block to an `OutputError` that names the output."""
    try:
        yield
    except LogprobeError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # pyarrow's own text is longer
        raise OutputError(f"{path}: cannot be written ({reason}); {remedy}") from error


def check_place(path: Path) -> None:
    """Check before a long computation that a file can be written to `path`.

    Raises:
        OutputError: the folder of `path` does not exist, or `path` is a folder.
    """
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{path}: the folder does not exist; create it first")
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; name a file")


def write_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file, flush it to disk, and rename it to `path`; see `replacing`."""
    with replacing(path) as unfinished:
        write(unfinished)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the block a temporary file, and flush and rename it to `path` when the block ends.

    A symbolic link at `path` stays, and the file that it names is replaced. If `path` is a device or a pipe,
    it is given to the block itself. On failure the temporary file is deleted, and a file at `path` stays as
    it was.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        claim(unfinished)
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _unreadable() -> tuple[type[Exception], ...]:
    """Return the exceptions that damaged files raise; pyarrow's are included only if it has been imported."""
    pyarrow = sys.modules.get("pyarrow")
    ours = (OSError, ValueError, RecursionError)
    return ours if pyarrow is None else (*ours, pyarrow.ArrowException)
