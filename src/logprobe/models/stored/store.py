"""`LoadStore`: what earlier loads of one model left in the cache, and a place for what this one leaves.

`engine.forward.ready` asks here before it does the work anew.
"""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any, Final, Self

from logprobe.errors import DownloadError
from logprobe.models.cache import MANIFEST, is_there, new_entry
from logprobe.models.given import is_copy
from logprobe.models.stored.identity import panels_folder, record_folder, source_key
from logprobe.models.stored.panels import read_panels, stored_forms, write_panels
from logprobe.models.stored.record import read_record, write_record
from logprobe.private_files import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models.resolution import ModelFiles

MAX_RECORDS: Final = 16  # of one model; some megabytes each

logger = logging.getLogger("logprobe")


class LoadStore:
    """The stored files of one model on this machine; a folder that cannot be written stores nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._source = source_key(folder)
        self._panels_folder = panels_folder(folder, self._source)
        self._record_folder = record_folder(folder, self._source)
        self._is_refused = False

    @classmethod
    def of(cls, files: ModelFiles) -> Self | None:
        """The store of a model; None for the copy of a loaded one, which goes with its engine."""
        has_weights = any(files.folder.glob("*.safetensors")) or (files.folder / MANIFEST).is_file()
        return cls(files.folder) if has_weights and not is_copy(files.folder) else None

    def panels(self, *, is_checked: bool = True) -> dict[str, PanelWeights]:
        """The mapped panels of the model, by the name of their module; none where there are none yet."""
        return (
            read_panels(self._panels_folder, is_checked=is_checked) if is_there(self._panels_folder) else {}
        )

    def forms(self) -> set[str]:
        """The forms of those panels."""
        return stored_forms(self._panels_folder) if is_there(self._panels_folder) else set()

    def write_panels(
        self, parts: Sequence[tuple[str, ...]], packed: Callable[[int], Iterable[PanelWeights]]
    ) -> dict[str, PanelWeights]:
        """Write the panels of a model and map them; none where they cannot be written.

        Whole panels that another process has written meanwhile stay.

        Args:
            parts: the names of all modules that share each.
            packed: gives those of all parts from a number on.
        """

        def is_damaged() -> bool:
            stored = self.panels()  # none where they are of another layout
            return not all(any(name in stored for name in names) for names in parts)

        try:
            with new_entry(self._panels_folder, resumes=True, is_damaged=is_damaged) as partial:
                if partial is not None:
                    write_panels(parts, packed, partial)
            sync(self._panels_folder.parent)
        except (DownloadError, OSError) as error:
            self._refuse(error)
        return self.panels(is_checked=False)

    def record(self) -> tuple[str, Mapping[str, Any]] | None:
        """Return the record, JSON, and its tensors that this code has stored on this machine."""
        return read_record(self._record_folder) if is_there(self._record_folder) else None

    def write_record(self, record: str, tensors: dict[str, Any]) -> None:
        """Store a record; the oldest of other code or libraries for this model are removed."""
        try:
            self._write(self._record_folder, lambda partial: write_record(partial, record, tensors))
        except (DownloadError, OSError) as error:
            self._refuse(error)

    def _write(self, folder: Path, write: Callable[[Path], None]) -> None:
        """Make an entry anew."""
        names = (one for one in folder.parent.glob(f"*-{self._source}-*") if one != folder)
        stored = [one for one in names if not one.name.startswith(".")]  # no locks, and nothing half written
        for older in sorted(stored, key=_modified_s)[: 1 - MAX_RECORDS]:
            shutil.rmtree(older, ignore_errors=True)
        with new_entry(folder, is_damaged=lambda: True) as partial:
            if partial is not None:
                write(partial)

    def _refuse(self, error: Exception) -> None:
        """Say once why nothing can be kept."""
        if not self._is_refused:
            logger.warning("%s: is proven and packed again at each load: %s", self._folder.name, error)
        self._is_refused = True


def _modified_s(path: Path) -> float:
    """Return when a path was modified; 0 where another process has just removed it."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
