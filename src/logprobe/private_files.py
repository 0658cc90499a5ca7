"""Files and folders that outlive a process and that other users must not write to or replace.

Readers ignore files that other users could have written, and log one line per path.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
_OTHERS_MAY_ENTER: Final = stat.S_IRWXG | stat.S_IRWXO
_NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)

logger = logging.getLogger("logprobe")
_told: set[str] = set()


def is_private(*paths: Path) -> bool:
    """Return True if each path that exists belongs to this user or root and no other user may write to it.

    If other users may enter a folder, its entries are checked too. A line is logged for each path that is
    not private.
    """
    return all(map(_is_private, paths))


def make_folder(path: Path, mode: int = FOLDER_MODE) -> None:
    """Create a folder and its missing parents, by default for this user only.

    Folders that exist already are not changed.

    Raises:
        OSError: the folder cannot be created.
    """
    if not path.is_dir():
        make_folder(path.parent, mode)
        try:
            path.mkdir(mode)
        except FileExistsError:  # created by another process meanwhile, or a file
            if not path.is_dir():
                raise


def make_private(folder: Path) -> None:
    """Remove other users' permissions on a folder and its contents; links are skipped.

    Raises:
        OSError: a mode cannot be set.
    """
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)


def write_private(path: Path, data: bytes) -> None:
    """Write a file atomically, for this user only; a link with the same name is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(_new_file(unfinished, FILE_MODE), "wb") as file:
            file.write(data)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk; does nothing for folders on Windows.

    Raises:
        OSError: the path cannot be opened, or the disk reports an error.
    """
    if os.name == "posix" or path.is_file():
        descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def claim(path: Path) -> None:
    """Replace whatever is at a path with an empty file, so that a link there is not followed.

    Raises:
        OSError: the file cannot be created.
    """
    with suppress(FileNotFoundError):
        path.unlink()
    os.close(_new_file(path, 0o666))  # minus the umask, like other output files


def _new_file(path: Path, mode: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | getattr(os, "O_BINARY", 0), mode)


def _is_private(path: Path) -> bool:
    if not hasattr(os, "geteuid"):  # Windows has no such permission bits
        return True
    try:
        facts = path.stat()
        open_to_others = stat.S_ISDIR(facts.st_mode) and facts.st_mode & _OTHERS_MAY_ENTER
        inner = [one.lstat() for one in path.iterdir()] if open_to_others else []
    except OSError:  # missing or unreadable
        return True
    if _is_own(facts) and all(map(_is_own, inner)):
        return True
    if str(path) not in _told:
        _told.add(str(path))
        logger.warning(
            "%s: ignored, because other users own it or can write to it; remove it, or run "
            "chmod -R go-w on it",
            path,
        )
    return False


def _is_own(facts: os.stat_result) -> bool:
    if facts.st_uid not in {0, os.geteuid()}:
        return False
    # The user's private group (same number) has no other members; a umask of 002 relies on that.
    others = stat.S_IWOTH if facts.st_gid == os.geteuid() else stat.S_IWOTH | stat.S_IWGRP
    return stat.S_ISLNK(facts.st_mode) or not facts.st_mode & others
