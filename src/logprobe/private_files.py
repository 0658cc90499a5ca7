"""Files and folders that this process keeps for later ones, which no other user may write or replace.

What others could have written is ignored by its readers, with one line in the log for each path.
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
    """Return True if each path that exists is owned by this user or root, and no other user may write to it.

    The files of a folder are looked at, too, where others may enter it; the log has one line for each path
    that is not private.
    """
    return all(map(_is_private, paths))


def make_folder(path: Path, mode: int = FOLDER_MODE) -> None:
    """Make a folder and its missing parents, by default for this user alone; one that exists stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    if not path.is_dir():
        make_folder(path.parent, mode)
        try:
            path.mkdir(mode)
        except FileExistsError:  # made by another process meanwhile, unless it is a file
            if not path.is_dir():
                raise


def make_private(folder: Path) -> None:
    """Take away from other users what a folder holds; links are left as they are.

    Raises:
        OSError: a mode cannot be set.
    """
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)


def write_private(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Write a file, by default for this user alone, whole or not at all; a link of its name is replaced.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(_new_file(unfinished, mode), "wb") as file:
            file.write(data)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file is on the disk, or the names in a folder are; Windows syncs no folders.

    Raises:
        OSError: it cannot be opened, or the disk reports an error.
    """
    if os.name == "posix" or path.is_file():
        descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def claim(path: Path) -> None:
    """Make an empty file in place of whatever has its name, so that a link there is not followed.

    Raises:
        OSError: it cannot be made.
    """
    with suppress(FileNotFoundError):
        path.unlink()
    os.close(_new_file(path, 0o666))  # less the umask, as the output files of users


def _new_file(path: Path, mode: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | getattr(os, "O_BINARY", 0), mode)


def _is_private(path: Path) -> bool:
    if not hasattr(os, "geteuid"):  # Windows has no such modes
        return True
    try:
        facts = path.stat()
        open_to_others = stat.S_ISDIR(facts.st_mode) and facts.st_mode & _OTHERS_MAY_ENTER
        inner = [one.lstat() for one in path.iterdir()] if open_to_others else []
    except OSError:  # there is nothing, or nothing that can be read
        return True
    if _is_own(facts) and all(map(_is_own, inner)):
        return True
    if str(path) not in _told:
        _told.add(str(path))
        logger.warning(
            "%s: is ignored, as other users own it or may write to it; remove it, or run chmod -R go-w on it",
            path,
        )
    return False


def _is_own(facts: os.stat_result) -> bool:
    if facts.st_uid not in {0, os.geteuid()}:
        return False
    # A group of the user's own number has no other members: what a umask of 002 relies on.
    others = stat.S_IWOTH if facts.st_gid == os.geteuid() else stat.S_IWOTH | stat.S_IWGRP
    return stat.S_ISLNK(facts.st_mode) or not facts.st_mode & others
