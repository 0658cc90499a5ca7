"""Disk usage of models: their files, and the panels and verification records in the cache.

Cache folders are named `<stem>-<source key>-<digest>` (see `identity`). They are found by the model's folder,
or by the stem if the folder is not known. `logprobe models` prints the result.
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

FILES, PANELS, RECORDS = "models", "panels", "loads"  # folders of the cache, by kind of entry
_KEY: Final = "-[0-9a-f]{16}"  # source key, or digest of the code and libraries
_MAX_STEM_CHARS: Final = 40
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")  # folder name of a snapshot in the hub's cache


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The files and cache entries of one model."""

    # folder of the model's files, in the cache or elsewhere; None if removed or not known
    folder: Path | None
    # folders in the cache, which may be removed; an entry may be finished, partial or both
    entries: tuple[Path, ...]

    @property
    def files_bytes(self) -> int | None:
        """Size of the model's files in bytes; None if their folder is not known."""
        folders = {*self._of(FILES), *([] if self.folder is None else [self.folder])}
        return sum(map(entry_size_bytes, folders)) if folders else None

    @property
    def panels_bytes(self) -> int:
        """Size of the model's panels in bytes."""
        return sum(map(entry_size_bytes, self._of(PANELS)))

    @property
    def records_bytes(self) -> int:
        """Size of the model's verification records in bytes."""
        return sum(map(entry_size_bytes, self._of(RECORDS)))

    @property
    def size_bytes(self) -> int:
        """Total size in bytes."""
        return (self.files_bytes or 0) + self.panels_bytes + self.records_bytes

    def _of(self, kind: str) -> list[Path]:
        return [entry for entry in self.entries if entry.parent.name == kind]


def of_folder(folder: Path) -> OnDisk:
    """Return the disk usage of a model; its folder may be in the cache, removed from the cache, or elsewhere.

    For a folder outside the cache, only cache entries made from the folder's current files are counted.

    Raises:
        InputError: the files cannot be read.
    """
    is_ours = folder.parent == home() / FILES
    prefix = re.escape(folder.name[:_MAX_STEM_CHARS]) + _KEY if is_ours else re.escape(_prefix(folder))
    left = [entry for entry in cached(PANELS, RECORDS) if re.fullmatch(prefix + _KEY, entry.name)]
    files = [entry for entry in cached(FILES) if entry == folder]
    return OnDisk(folder if folder.is_dir() else None, (*files, *left))


def left_by_others(known: Collection[Path]) -> dict[str, OnDisk]:
    """Return the cache entries of all models except the known ones, by hub id or folder name.

    Args:
        known: folders of the models to leave out.
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
        raise InputError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from error


def _hub_snapshot(stem: str) -> Path | None:
    """Return the snapshot folder of commit `stem` in the Hub's cache; None if there is none."""
    if _COMMIT.fullmatch(stem) is None:
        return None
    from huggingface_hub import constants

    return next(Path(constants.HF_HUB_CACHE).glob(f"models--*/snapshots/{stem}"), None)


def _hub_id(snapshot: Path) -> str:
    return snapshot.parents[1].name.removeprefix("models--").replace("--", "/", 1)
