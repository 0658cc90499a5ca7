"""`LoadStore`: reads and writes the files that loading a model stores in the cache.

`engine.forward.load` uses it to skip packing and verification after the first load. The record of a first,
verified load is one file: JSON text whose schema the caller defines, and tensors. These are the model's small
tensors (norms, biases, rotary frequencies) and some of transformers' logits, which every later load must
reproduce.
"""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from logprobe.errors import DownloadError, UnsupportedModelError
from logprobe.models.cache import MANIFEST, is_there, new_entry
from logprobe.models.given import is_copy
from logprobe.models.safetensors_files import save_tensors, tensors_of
from logprobe.models.stored.identity import panels_folder, record_folder, source_key
from logprobe.models.stored.panels import read_panels, stored_forms, write_panels
from logprobe.private_files import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models.resolution import ModelFiles

RECORD_FILE: Final = "load.safetensors"
MAX_RECORDS: Final = 16  # limit per model; a record has a few megabytes
_KEY: Final = "record"  # of the JSON text in the file's metadata

logger = logging.getLogger("logprobe")


class LoadStore:
    """The cached files of one model; nothing is stored if the cache cannot be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._source = source_key(folder)
        self._panels_folder = panels_folder(folder, self._source)
        self._record_folder = record_folder(folder, self._source)
        self._is_refused = False

    @classmethod
    def of(cls, files: ModelFiles) -> Self | None:
        """Return the store of a model; None without weights, and for a temporary copy of a loaded model."""
        has_weights = any(files.folder.glob("*.safetensors")) or (files.folder / MANIFEST).is_file()
        return cls(files.folder) if has_weights and not is_copy(files.folder) else None

    def panels(self, *, is_checked: bool = True) -> dict[str, PanelWeights]:
        """Return the model's mapped panels by module name; empty if none are stored."""
        return (
            read_panels(self._panels_folder, is_checked=is_checked) if is_there(self._panels_folder) else {}
        )

    def forms(self) -> set[str]:
        """Return the names of the panel formats that are stored for the model."""
        return stored_forms(self._panels_folder) if is_there(self._panels_folder) else set()

    def write_panels(
        self, parts: Sequence[tuple[str, ...]], packed: Callable[[int], Iterable[PanelWeights]]
    ) -> dict[str, PanelWeights]:
        """Write the model's panels and map them; return an empty dict if they cannot be written.

        If another process has written complete panels in the meantime, these are used instead.

        Args:
            parts: for each matrix, the names of all modules that share the matrix.
            packed: function that takes an index in `parts` and returns the panels from this matrix on.
        """

        def is_damaged() -> bool:
            stored = self.panels()  # empty if they have another layout version
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
        """Return the JSON record and tensors that this version of the code stored; None if there are none."""
        from safetensors import SafetensorError

        if not is_there(self._record_folder):
            return None
        try:
            tensors, metadata = tensors_of(self._record_folder / RECORD_FILE)
            # Copied, because mapped arrays would keep the file open.
            return metadata[_KEY], {name: np.array(tensor.read()) for name, tensor in tensors.items()}
        except (OSError, KeyError, ValueError, SafetensorError, UnsupportedModelError):
            return None

    def write_record(self, record: str, tensors: dict[str, Any]) -> None:
        """Store a record, and remove this model's oldest records if there are more than `MAX_RECORDS`."""
        folder = self._record_folder
        try:
            names = (one for one in folder.parent.glob(f"*-{self._source}-*") if one != folder)
            stored = [one for one in names if not one.name.startswith(".")]  # no locks and partial entries
            for older in sorted(stored, key=_modified_s)[: 1 - MAX_RECORDS]:
                shutil.rmtree(older, ignore_errors=True)
            with new_entry(folder, is_damaged=lambda: True) as partial:
                if partial is not None:
                    save_tensors(tensors, partial / RECORD_FILE, {_KEY: record})
        except (DownloadError, OSError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        """Log, once, why nothing can be stored."""
        if not self._is_refused:
            logger.warning(
                "%s: cannot store packed weights, so each load verifies and packs again: %s",
                self._folder.name,
                error,
            )
        self._is_refused = True


def _modified_s(path: Path) -> float:
    """Return a path's modification time in seconds; 0 if another process has just removed the path."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
