"""The model cache: a folder of entries that are created atomically.

`fetch` and `convert` write into the temporary folder that `new_entry` yields; `resolve` reads finished
entries.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from platformdirs import user_cache_path

from logprobe.errors import DownloadError, OutputError
from logprobe.private_files import FOLDER_MODE, is_private, make_folder, make_private, write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from filelock import BaseFileLock

# File with the name and source of an entry; written last.
MANIFEST: Final = "logprobe.json"
# File name of an entry's GGUF file, or of a link to the user's file.
GGUF: Final = "model.gguf"
# Part of every entry's name; increase the number to invalidate entries from older conversions.
CONVERSION: Final = 3
CHECKSUMS: Final = "checksums.json"
MAX_CHECKSUMS: Final = 256
# A file modified this recently may change again without a new modification time, as clocks are coarse.
FRESH_NS: Final = 2_000_000_000
# Errors of a full disk.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
# Folder name of an entry that is being created, or whose creation was interrupted.
_HALF_MADE: Final = re.compile(r"^\.(.+)\.partial$")


def home() -> Path:
    """Return the cache folder: `$LOGPROBE_HOME`, or `logprobe` in the user's cache folder."""
    if chosen := os.environ.get("LOGPROBE_HOME"):
        return Path(chosen).expanduser()
    # `opinion=False`: no additional folder `Cache` on Windows.
    return user_cache_path("logprobe", appauthor=False, opinion=False)


def entry_folder(stem: str, sha256: str) -> Path:
    """Return the folder of the cache entry for a GGUF file with this SHA-256; it need not exist."""
    return home() / "models" / f"{stem}-{sha256[:16]}-c{CONVERSION}"


def entries() -> list[Path]:
    """List the folders of all finished entries with the current `CONVERSION`, sorted by name."""
    return sorted(folder for folder in (home() / "models").glob(f"[!.]*-c{CONVERSION}") if is_there(folder))


def is_there(folder: Path) -> bool:
    """Return True if an entry is finished and only this user can write to the folder and its parents."""
    return folder.is_dir() and is_private(home(), folder.parent, folder)


def cached(*kinds: str) -> list[Path]:
    """List the folders of finished and partial entries of the given kinds: `models`, `panels`, `loads`."""
    folders = [folder for kind in kinds for folder in sorted((home() / kind).glob("*")) if folder.is_dir()]
    return [*dict.fromkeys(folder.with_name(_HALF_MADE.sub(r"\1", folder.name)) for folder in folders)]


def entry_size_bytes(folder: Path) -> int:
    """Return the total size in bytes of an entry's files, finished and partial."""
    return sum(_size_bytes(file) for file in [*folder.glob("*"), *_partial(folder).rglob("*")])


def checksum_of(path: Path) -> str:
    """Return the SHA-256 of a file; the file is hashed again only when its size or times change.

    Raises:
        OSError: the file cannot be read.
    """
    return checksums_of([path])[0]


def checksums_of(paths: Sequence[Path]) -> list[str]:
    """Return the result of `checksum_of` for each file; files that must be hashed are hashed in parallel."""
    # Links are not resolved, so that a link with a new target is looked up again.
    places = [os.path.abspath(path) for path in paths]  # noqa: PTH100
    facts = [path.stat() for path in paths]
    now = [[one.st_size, one.st_mtime_ns, one.st_ctime_ns] for one in facts]
    known = _checksums()
    new = [number for number, place in enumerate(places) if known.get(place, [])[:-1] != now[number]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        computed = dict(zip(new, pool.map(_sha256, [paths[number] for number in new]), strict=True))
    latest = time.time_ns() - FRESH_NS
    settled = {
        places[number]: [*now[number], sha256]
        for number, sha256 in computed.items()
        if max(facts[number].st_mtime_ns, facts[number].st_ctime_ns) < latest
    }
    if settled:
        _remember(known | settled)
    return [computed.get(number) or str(known[place][-1]) for number, place in enumerate(places)]


def listed_version(paths: Sequence[Path], digests: Sequence[str]) -> str:
    """Return a version for a set of files: `sha256:` and the SHA-256 of what `sha256sum` prints for them."""
    listed = "".join(f"{digest}  {path.name}\n" for digest, path in zip(digests, paths, strict=True))
    return f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksums() -> dict[str, list[Any]]:
    """Read the stored checksums, a map from path to [size, mtime_ns, ctime_ns, SHA-256]."""
    if not is_private(home(), home() / CHECKSUMS):
        return {}
    try:
        known = json.loads((home() / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(known, dict) and all(isinstance(facts, list) for facts in known.values())
    return known if is_ours else {}


def _remember(known: dict[str, list[Any]]) -> None:
    """Store the checksums, unless the cache cannot be written."""
    with suppress(OSError):
        make_folder(home())
        if is_private(home()):
            data = json.dumps(dict([*known.items()][-MAX_CHECKSUMS:]))
            write_private(home() / CHECKSUMS, data.encode())


def point_at(link: Path, path: Path) -> None:
    """Create or replace, atomically, a symbolic link to `path`.

    Raises:
        OSError: the link cannot be created.
    """
    own = link.with_name(f".{link.name}.{secrets.token_hex(8)}")
    own.symlink_to(path.absolute())
    own.replace(link)


def remove_entry(folder: Path) -> None:
    """Remove a finished or partial entry; the folder is renamed before its files are deleted.

    Raises:
        OutputError: the entry cannot be removed.
    """
    partial = _partial(folder)
    try:
        with _locked(folder):
            _remove(partial)
            with suppress(FileNotFoundError):  # there is only a partial entry
                folder.replace(partial)
            _remove(partial)
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{folder}: cannot be removed ({reason}); remove it by hand") from error


@contextmanager
def new_entry(
    folder: Path, *, resumes: bool = False, is_damaged: Callable[[], bool] = lambda: False
) -> Iterator[Path | None]:
    """Yield a temporary folder that is renamed to `folder` if the block succeeds and removed if it fails.

    Only one process at a time runs the block for an entry. The others wait, and get None if the entry
    exists afterwards.

    Args:
        folder: folder of the entry.
        resumes: if True, keep the files of an interrupted block for the next call.
        is_damaged: function that is called if the entry exists; if it returns True, the entry is created
            again.

    Raises:
        DownloadError: the cache cannot be written, for instance because the disk is full.
    """
    partial = _partial(folder)
    try:
        make_folder(folder.parent)
        if not is_private(home(), folder.parent):
            raise DownloadError(
                f"{folder.name}: other users can write below {folder.parent}; run chmod -R go-w "
                f"{folder.parent}, or set LOGPROBE_HOME to another folder"
            )
        with _locked(folder):
            if is_there(folder) and not is_damaged():
                yield None
                return
            _remove(folder)  # the entry is writable by other users, or damaged
            if not resumes or not is_private(partial):
                _remove(partial)
            partial.mkdir(FOLDER_MODE, exist_ok=True)
            try:
                yield partial
                make_private(partial)
                partial.replace(folder)
            except Exception:
                _remove(partial)
                raise
            except BaseException:
                if not resumes:
                    _remove(partial)
                raise
    except OSError as error:
        if isinstance(error, DownloadError):
            raise
        reason = error.strerror or str(error)
        remedy = "free some space there" if error.errno in _FULL else "make it writable"
        raise DownloadError(
            f"{folder.name}: cannot write below {folder.parent} ({reason}); {remedy}, "
            "or set LOGPROBE_HOME to another folder"
        ) from error


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _size_bytes(file: Path) -> int:
    try:
        facts = file.lstat()  # a link to a user's file counts as 0
    except OSError:  # another process has removed the file
        return 0
    return facts.st_size if stat.S_ISREG(facts.st_mode) else 0


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock: BaseFileLock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"{folder.name}: another process is preparing it; waiting")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def in_words(num_bytes: int) -> str:
    """Format a size, for example `1.5 GB`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def say(message: str) -> None:
    """Print a line to standard error; standard output is for results."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
