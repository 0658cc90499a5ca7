"""Panels in a file that is mapped and never converted again.

PANELS holds the panels' bytes, INDEX where each module's lie, with their form and shape, and the length and
checksum of the whole. The map is read-only and shared, so that all processes on one model hold one copy.
Before it: a GGUF file, or a loaded module. After it: the engine's `published` layers.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
import zlib
from typing import TYPE_CHECKING, Any, Final

import torch

from logprobe.kernels.layers.forms import PanelWeights
from logprobe.kernels.layers.widen import FORMS, LAYOUT

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PANELS: Final = "panels.bin"
INDEX: Final = "panels.json"
ALIGNMENT: Final = 64  # bytes of a cache line
_CHUNK_BYTES: Final = 1 << 22
_READ_AS_ONE: Final = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
_MOST: Final = 1 << 40  # no number of outputs or inputs is as large


def write_panels(named: Iterable[tuple[tuple[str, ...], PanelWeights]], folder: Path) -> None:
    """Write panels one after another, each under the names of all modules that share it.

    Raises:
        OSError: the folder cannot be written.
    """
    entries: dict[str, Any] = {}
    with (folder / PANELS).open("wb") as file:
        for names, panels in named:
            file.write(bytes(-file.tell() % ALIGNMENT))
            entry = [panels.form.name, panels.num_outputs, panels.num_inputs, file.tell()]
            entries |= dict.fromkeys(names, entry)
            file.write(panels.data.numpy().data)
        num_bytes = file.tell()
        file.flush()
        os.fsync(file.fileno())  # the folder's name may appear right after this
    index = {
        "layout": LAYOUT,
        "bytes": num_bytes,
        "crc32": checksum(folder / PANELS),
        "tensors": entries,
    }
    (folder / INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")


def reading_order(name: str) -> tuple[str, int, str]:
    """Sorts names of modules so that what is read as one lies side by side."""
    parent, _, last = name.rpartition(".")
    return parent, _READ_AS_ONE.get(last, len(_READ_AS_ONE)), last


def read_panels(folder: Path, *, is_checked: bool = True) -> dict[str, PanelWeights]:
    """Map a folder's panels, by the name of their module; none where it has none that can be used.

    Panels of another layout, a file of another length than the index says, or (where `is_checked`) another
    checksum count as none: whoever asked builds them again.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        num_bytes = (folder / PANELS).stat().st_size
        is_whole = index["layout"] == LAYOUT and index.get("bytes", num_bytes) == num_bytes
        if not is_whole or (is_checked and index.get("crc32") not in {None, checksum(folder / PANELS)}):
            return {}
        return _mapped(folder / PANELS, index["tensors"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def stored_forms(folder: Path) -> set[str]:
    """The forms of a folder's panels; none where it has none."""
    return {panels.form.name for panels in read_panels(folder, is_checked=False).values()}


def checksum(path: Path) -> int:
    """CRC-32 of a file, in pieces."""
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            total = zlib.crc32(chunk, total)
    return total


def _mapped(path: Path, entries: dict[str, Any]) -> dict[str, PanelWeights]:
    """Views of one map.

    Raises:
        ValueError: an entry lies outside the file, or is no entry.
    """
    with path.open("rb") as file, warnings.catch_warnings():
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nothing writes
        memory = torch.frombuffer(whole, dtype=torch.uint8)
    panels: dict[str, PanelWeights] = {}
    for name, (form, num_outputs, num_inputs, start) in entries.items():
        are_counts = all(isinstance(n, int) and 0 < n < _MOST for n in (num_outputs, num_inputs))
        if not are_counts or not isinstance(start, int) or start < 0 or start % ALIGNMENT:
            raise ValueError(f"{name}: is no entry of panels")
        shape = PanelWeights(FORMS[form], num_outputs, num_inputs, memory[:0])
        end = start + shape.num_bytes
        if end > len(memory):
            raise ValueError(f"{name}: lies beyond the end of {path.name}")
        panels[name] = PanelWeights(FORMS[form], num_outputs, num_inputs, memory[start:end])
    return panels
