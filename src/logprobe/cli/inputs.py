"""Where a command's text comes from: an argument, a file, or standard input.

Bytes are read and decoded as they are: no newline is changed, no mark at the start is dropped.
"""

from __future__ import annotations

import sys
from pathlib import Path

from logprobe.errors import InputError

STDIN = "-"


def read_text(name: str) -> str:
    """The text of a file, or of standard input where `name` is `-`.

    Raises:
        InputError: it cannot be read, is not UTF-8, or is empty.
    """
    title = "standard input" if name == STDIN else name
    return checked_text(title, decoded(title, _read_bytes(name)))


def decoded(title: str, data: bytes) -> str:
    """The text of some UTF-8 bytes.

    Raises:
        InputError: they are not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise InputError(
            f"{title}: is not UTF-8 text (byte 0x{byte:02x} at byte {error.start}); convert it first, "
            "for instance with iconv -t UTF-8"
        ) from error


def checked_text(title: str, text: str) -> str:
    """The text itself.

    Raises:
        InputError: it is empty.
    """
    if not text:
        raise InputError(f"{title}: is empty; give at least one character")
    return text


def _read_bytes(name: str) -> bytes:
    if name == STDIN:
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{name}: no such file; name a text file, or - for standard input") from error
    except IsADirectoryError as error:
        raise InputError(f"{name}: is a folder; name a text file in it") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name}: cannot be read ({reason}); name another file") from error
