"""The folder that models are kept in, and entries that appear in it whole or not at all.

`fetch` and `convert` write into what `new_entry` hands out; `resolve` reads finished entries.
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

# The file of an entry that says where it came from; it is written last.
MANIFEST: Final = "logprobe.json"
# The GGUF file of an entry: itself, or a link to where the user keeps it.
GGUF: Final = "model.gguf"
# Part of every entry's name: raising it makes all entries of older conversions unused.
CONVERSION: Final = 3
CHECKSUMS: Final = "checksums.json"
MAX_CHECKSUMS: Final = 256
FRESH_NS: Final = (
    2_000_000_000  # a file written as lately may be written again within the same tick of its clock
)
# The name of an entry that is being made, or was not made.
_HALF_MADE: Final = re.compile(r"^\.(.+)\.partial$")


def home() -> Path:
    """Give the cache's folder: `$LOGPROBE_HOME`, or `logprobe` in the user's cache folder."""
    if chosen := os.environ.get("LOGPROBE_HOME"):
        return Path(chosen).expanduser()
    # On Windows without a folder `Cache` of its own below it.
    return user_cache_path("logprobe", appauthor=False, opinion=False)


def entry_folder(stem: str, sha256: str) -> Path:
    """Give the folder where the converted file with that checksum lives, or will live."""
    return home() / "models" / f"{stem}-{sha256[:16]}-c{CONVERSION}"


def entries() -> list[Path]:
    """List the folders of all finished entries of the present conversion, by name."""
    return sorted(folder for folder in (home() / "models").glob(f"[!.]*-c{CONVERSION}") if is_there(folder))


def is_there(folder: Path) -> bool:
    """Return True if an entry is finished, and no other user could have written it or its parents."""
    return folder.is_dir() and is_private(home(), folder.parent, folder)


def cached(*kinds: str) -> list[Path]:
    """List the folders of all entries of some kinds (`models`, `panels`, `loads`), finished or half made."""
    folders = [folder for kind in kinds for folder in sorted((home() / kind).glob("*")) if folder.is_dir()]
    return [*dict.fromkeys(folder.with_name(_HALF_MADE.sub(r"\1", folder.name)) for folder in folders)]


def entry_size_bytes(folder: Path) -> int:
    """Add up the sizes of an entry's files, and of what is half made of it."""
    return sum(_size_bytes(file) for file in [*folder.glob("*"), *_partial(folder).rglob("*")])


def checksum_of(path: Path) -> str:
    """The SHA-256 of a file, computed once as long as its size and times stay what they are.

    Raises:
        OSError: the file cannot be read.
    """
    return checksums_of([path])[0]


def checksums_of(paths: Sequence[Path]) -> list[str]:
    """`checksum_of` of some files, those that are not known on several cores."""
    # A link that is set anew is another file.
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
    """What tells some files from others: `sha256:` and the digest of what `sha256sum` writes of them."""
    listed = "".join(f"{digest}  {path.name}\n" for digest, path in zip(digests, paths, strict=True))
    return f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksums() -> dict[str, list[Any]]:
    """Of files by their place: size, times, SHA-256."""
    if not is_private(home(), home() / CHECKSUMS):
        return {}
    try:
        known = json.loads((home() / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(known, dict) and all(isinstance(facts, list) for facts in known.values())
    return known if is_ours else {}


def _remember(known: dict[str, list[Any]]) -> None:
    """Write what is known; a cache that cannot be written remembers nothing."""
    with suppress(OSError):
        make_folder(home())
        if is_private(home()):
            data = json.dumps(dict([*known.items()][-MAX_CHECKSUMS:]))
            write_private(home() / CHECKSUMS, data.encode())


def point_at(link: Path, path: Path) -> None:
    """Let a link be one to a file, whatever it was before.

    Raises:
        OSError: it cannot be made.
    """
    own = link.with_name(f".{link.name}.{secrets.token_hex(8)}")
    own.symlink_to(path.absolute())
    own.replace(link)


def remove_entry(folder: Path) -> None:
    """Remove an entry, whole: it is out of the way before its files go; and what is half made of it.

    Raises:
        OutputError: it cannot be removed; then it is still there.
    """
    partial = _partial(folder)
    try:
        with _locked(folder):
            _remove(partial)
            with suppress(FileNotFoundError):  # it was half made
                folder.replace(partial)
            _remove(partial)
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{folder}: cannot be removed ({reason}); remove it by hand") from error


@contextmanager
def new_entry(
    folder: Path, *, resumes: bool = False, is_damaged: Callable[[], bool] = lambda: False
) -> Iterator[Path | None]:
    """Hand out a folder that becomes `folder` when the block ends well, and vanishes when it fails.

    Only one process at a time is in the block of one entry. The others wait, and then get None, because the
    entry is there. What an interrupted one left behind is cleared by the next one, or handed out again where
    that `resumes`. An entry that `is_damaged` is made anew.

    Raises:
        DownloadError: the cache cannot be written, for instance because the disk is full.
    """
    partial = _partial(folder)
    try:
        make_folder(folder.parent)
        if not is_private(home(), folder.parent):
            raise PermissionError(errno.EPERM, "other users may write there; run chmod -R go-w on it")
        with _locked(folder):
            if is_there(folder) and not is_damaged():
                yield None
                return
            _remove(folder)  # of another user, or damaged
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
        raise DownloadError(
            f"{folder.name}: cannot write below {folder.parent} ({reason}); free some space there, "
            "or set LOGPROBE_HOME to a folder on another disk"
        ) from error


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _size_bytes(file: Path) -> int:
    try:
        facts = file.lstat()  # a link to a user's file takes nothing
    except OSError:  # whoever makes or removes the entry took it away
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
    """Give a size as people read it."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def say(message: str) -> None:
    """Tell the person at the terminal; standard output is kept for results."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
