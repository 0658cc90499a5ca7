"""Store packed weights (panels) in a file, which is memory-mapped when the model is loaded again.

PANELS has the bytes of all panels. INDEX has the offset, format and shape of each module's panels, and the
length and checksum of PANELS. The mapping is read-only and shared, so that all processes that run a model
share one copy. Both files are synced to disk before their folder gets its final name. Until then, JOURNAL
has a checksum per written matrix, so that an interrupted load resumes after the last complete matrix.
PANELS is written with `write`, because on a full disk a write to a mapping raises SIGBUS instead of an
error.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec
import numpy as np

from logprobe.kernels.layers.forms import PanelWeights
from logprobe.kernels.layers.layout import FORMS, LAYOUT
from logprobe.private_files import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

PANELS: Final = "panels.bin"
INDEX: Final = "panels.json"
JOURNAL: Final = "panels.journal"
ALIGNMENT: Final = 64  # bytes of a cache line
_CHUNK_BYTES: Final = 1 << 22
_READ_AS_ONE: Final = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
_MOST: Final = 1 << 40  # upper bound on the number of outputs or inputs


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """A line in JOURNAL, which describes one written matrix."""

    layout: int
    names: tuple[str, ...]
    entry: tuple[str, int, int, int]  # form, outputs, inputs, first byte
    end: int
    crc32: int  # checksum of all bytes before `end`


def write_panels(
    parts: Sequence[tuple[str, ...]], packed: Callable[[int], Iterable[PanelWeights]], folder: Path
) -> None:
    """Write panels to a folder and sync the folder; resume after the panels that an interrupted call wrote.

    Args:
        parts: for each matrix, the names of all modules that share the matrix.
        packed: function that takes an index in `parts` and returns the panels of the matrices from there on.
        folder: the target folder, which the caller renames afterwards.

    Raises:
        OSError: the folder cannot be written.
    """
    lines = _written(parts, folder)
    end, crc32 = (lines[-1].end, lines[-1].crc32) if lines else (0, 0)
    (folder / PANELS).touch()
    os.truncate(folder / PANELS, end)
    with (folder / PANELS).open("ab") as file, (folder / JOURNAL).open("wb") as journal:
        journal.writelines(map(_encode, lines))
        for names, panels in zip(parts[len(lines) :], packed(len(lines)), strict=True):
            entry = (panels.form.name, panels.num_outputs, panels.num_inputs, end + -end % ALIGNMENT)
            for data in (bytes(-end % ALIGNMENT), panels.data.data):
                file.write(data)
                crc32 = zlib.crc32(data, crc32)
                end += len(data)
            file.flush()
            lines.append(_Line(LAYOUT, names, entry, end, crc32))
            journal.write(_encode(lines[-1]))
            journal.flush()
        os.fsync(file.fileno())
    tensors = {name: line.entry for line in lines for name in line.names}
    index = {"layout": LAYOUT, "bytes": end, "crc32": crc32, "tensors": tensors}
    (folder / INDEX).write_bytes(msgspec.json.encode(index) + b"\n")
    sync(folder / INDEX)
    (folder / JOURNAL).unlink()
    sync(folder)


def _encode(line: _Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _written(parts: Sequence[tuple[str, ...]], folder: Path) -> list[_Line]:
    """Return the journal that an interrupted call wrote, up to the first missing or damaged matrix."""
    lines: list[_Line] = []
    end, crc32 = 0, 0
    with suppress(OSError, msgspec.MsgspecError), (folder / PANELS).open("rb") as file:
        for names, text in zip(parts, (folder / JOURNAL).read_bytes().splitlines(), strict=False):
            line = msgspec.json.decode(text, type=_Line)
            crc32 = _checksum(file, line.end - end, crc32)
            if (line.layout, line.names, line.crc32, file.tell()) != (LAYOUT, names, crc32, line.end):
                break
            lines.append(line)
            end = line.end
    return lines


def reading_order(name: str) -> tuple[str, int, str]:
    """Return a sort key for module names that puts q_proj, k_proj and v_proj next to each other."""
    parent, _, last = name.rpartition(".")
    return parent, _READ_AS_ONE.get(last, len(_READ_AS_ONE)), last


def read_panels(folder: Path, *, is_checked: bool = True) -> dict[str, PanelWeights]:
    """Map the panels in a folder into memory, by module name; return an empty dict if they are not usable.

    Panels are not usable if the layout version is not the current one, or if the file's length or (with
    `is_checked`) its checksum differs from the index.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["layout"] != LAYOUT or index["bytes"] != (folder / PANELS).stat().st_size:
            return {}
        if is_checked and index["crc32"] != checksum(folder / PANELS):
            return {}
        return _mapped(folder / PANELS, index["tensors"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def stored_forms(folder: Path) -> set[str]:
    """Return the names of the panel formats in a folder."""
    return {panels.form.name for panels in read_panels(folder, is_checked=False).values()}


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    with path.open("rb") as file:
        return _checksum(file, path.stat().st_size)


def _checksum(file: BinaryIO, num_bytes: int, crc32: int = 0) -> int:
    """Continue a CRC-32 over the next bytes of a file, in chunks."""
    while num_bytes > 0 and (chunk := file.read(min(num_bytes, _CHUNK_BYTES))):
        crc32 = zlib.crc32(chunk, crc32)
        num_bytes -= len(chunk)
    return crc32


def _mapped(path: Path, entries: dict[str, Any]) -> dict[str, PanelWeights]:
    """Map a file and return its panels as views.

    Raises:
        KeyError, TypeError, ValueError: an entry is not valid, or lies outside the file.
    """
    with path.open("rb") as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    memory = np.frombuffer(whole, np.uint8)
    panels: dict[str, PanelWeights] = {}
    for name, (form, num_outputs, num_inputs, start) in entries.items():
        are_counts = all(isinstance(n, int) and 0 < n < _MOST for n in (num_outputs, num_inputs))
        if not are_counts or not isinstance(start, int) or start < 0 or start % ALIGNMENT:
            raise ValueError(f"{name}: is not a valid entry")
        shape = PanelWeights(FORMS[form], num_outputs, num_inputs, memory[:0])
        end = start + shape.num_bytes
        if end > len(memory):
            raise ValueError(f"{name}: extends beyond the end of {path.name}")
        panels[name] = PanelWeights(FORMS[form], num_outputs, num_inputs, memory[start:end])
    return panels
