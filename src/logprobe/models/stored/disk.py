"""What of each model lies on the disk: its files, and the panels and records that loads left in the cache.

Their folders are named `<stem>-<source key>-<digest>` (`identity`): they are found by the model's own folder,
or by the stem alone where nobody knows that folder any more. After it: `logprobe models`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logprobe.errors import InputError
from logprobe.models.cache import cached, entry_size_bytes, home

if TYPE_CHECKING:
    from collections.abc import Collection

FILES, PANELS, RECORDS = "models", "panels", "loads"  # what the cache's entries are, by their folder
_KEY: Final = "-[0-9a-f]{16}"  # of the source, or of code and machine
_MAX_STEM_CHARS: Final = 40
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")  # a snapshot of the hub is named so


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What of one model lies on the disk."""

    folder: Path | None  # of its files, in the cache or elsewhere; None where it is gone or not known
    entries: tuple[Path, ...]  # of the cache, which may be removed; whole, half made, or both

    @property
    def files_bytes(self) -> int | None:
        """Of its files; None where nobody knows them."""
        folders = {*self._of(FILES), *([] if self.folder is None else [self.folder])}
        return sum(map(entry_size_bytes, folders)) if folders else None

    @property
    def panels_bytes(self) -> int:
        """Of its panels."""
        return sum(map(entry_size_bytes, self._of(PANELS)))

    @property
    def records_bytes(self) -> int:
        """Of what was proven of it."""
        return sum(map(entry_size_bytes, self._of(RECORDS)))

    @property
    def size_bytes(self) -> int:
        """Of all that is known."""
        return (self.files_bytes or 0) + self.panels_bytes + self.records_bytes

    def _of(self, kind: str) -> list[Path]:
        return [entry for entry in self.entries if entry.parent.name == kind]


def of_folder(folder: Path) -> OnDisk:
    """What lies there of a model: one that the cache keeps, or once did, or one in a folder of the caller's.

    Of the latter that is what was made of its files as they are now.

    Raises:
        InputError: they cannot be read.
    """
    is_ours = folder.parent == home() / FILES
    prefix = re.escape(folder.name[:_MAX_STEM_CHARS]) + _KEY if is_ours else re.escape(_prefix(folder))
    left = [entry for entry in cached(PANELS, RECORDS) if re.fullmatch(prefix + _KEY, entry.name)]
    files = [entry for entry in cached(FILES) if entry == folder]
    return OnDisk(folder if folder.is_dir() else None, (*files, *left))


def left_by_others(known: Collection[Path]) -> dict[str, OnDisk]:
    """What lies in the cache of models that it does not keep, by the names of those, or of their folders.

    `known` are the folders of those that it keeps.
    """
    known_stems = {folder.name[:_MAX_STEM_CHARS] for folder in known}
    left: dict[str, OnDisk] = {}
    for entry in cached(FILES, PANELS, RECORDS):
        stem = re.sub(f"{_KEY}{_KEY}$", "", entry.name)
        if stem[:_MAX_STEM_CHARS] not in known_stems:
            snapshot = _hub_snapshot(stem)
            name = stem if snapshot is None else _hub_id(snapshot)
            others = left[name].entries if name in left else ()
            left[name] = OnDisk(snapshot, (*others, entry))
    return dict(sorted(left.items()))


def _prefix(folder: Path) -> str:
    from logprobe.models.stored.identity import panels_folder, source_key

    try:
        return panels_folder(folder, source_key(folder)).name.rpartition("-")[0]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror}); look who may read it") from error


def _hub_snapshot(stem: str) -> Path | None:
    """Where the hub's cache has the commit that a folder is named by."""
    if _COMMIT.fullmatch(stem) is None:
        return None
    from huggingface_hub import constants

    return next(Path(constants.HF_HUB_CACHE).glob(f"models--*/snapshots/{stem}"), None)


def _hub_id(snapshot: Path) -> str:
    return snapshot.parents[1].name.removeprefix("models--").replace("--", "/", 1)
