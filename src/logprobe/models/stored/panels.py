"""Panels in a file that is mapped and never converted again.

PANELS holds the panels' bytes, INDEX where each module's lie, with their form and shape, and the length and
checksum of the whole. The map is read-only and shared, so that all processes on one model hold one copy.
While they are written, LINES tells of each matrix that is whole: who was interrupted goes on behind the last.
They are written, not mapped: on a full disk that is an error, where a write to a map would be a signal.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import time
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import torch

from logprobe.kernels.layers.forms import PanelWeights
from logprobe.kernels.layers.layout import FORMS, LAYOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PANELS: Final = "panels.bin"
INDEX: Final = "panels.json"
LINES: Final = "panels.lines"
ON_DISK: Final = "panels.on-disk"  # is there when the panels are sure to outlive a loss of power
ALIGNMENT: Final = 64  # bytes of a cache line
_CHUNK_BYTES: Final = 1 << 22
_WRITTEN_BACK_S: Final = 120.0  # by when a system has long written to the disk what it was given
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_READ_AS_ONE: Final = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
T = TypeVar("T")
_MOST: Final = 1 << 40  # no number of outputs or inputs is as large


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What the lines of a file that is being written hold for."""

    layout: int
    boot: str


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """One matrix of a file of panels that is being written."""

    names: tuple[str, ...]
    entry: tuple[str, int, int, int]  # form, outputs, inputs, and where it begins
    end: int
    crc32: int  # of all before `end`


def write_panels(
    parts: Sequence[tuple[str, ...]], packed: Callable[[int], Iterable[PanelWeights]], folder: Path
) -> None:
    """Write panels one after another, behind those of an interrupted call.

    Args:
        parts: the names of all modules that share each.
        packed: gives those of all parts from a number on.
        folder: where to.

    Raises:
        OSError: the folder cannot be written.
    """
    lines = _written(parts, folder)
    end, crc32 = (lines[-1].end, lines[-1].crc32) if lines else (0, 0)
    (folder / PANELS).touch()
    os.truncate(folder / PANELS, end)
    with (folder / PANELS).open("ab") as file, (folder / LINES).open("wb") as journal:
        journal.write(_line(_Head(LAYOUT, boot_id())))
        journal.writelines(map(_line, lines))
        for names, panels in zip(parts[len(lines) :], packed(len(lines)), strict=True):
            entry = (panels.form.name, panels.num_outputs, panels.num_inputs, end + -end % ALIGNMENT)
            for data in (bytes(-end % ALIGNMENT), panels.data.numpy().data):
                file.write(data)
                crc32 = zlib.crc32(data, crc32)
                end += len(data)
            file.flush()
            lines.append(_Line(names, entry, end, crc32))
            journal.write(_line(lines[-1]))
            journal.flush()
    tensors = {name: line.entry for line in lines for name in line.names}
    index = {"layout": LAYOUT, "bytes": end, "crc32": crc32, "boot": boot_id(), "tensors": tensors}
    (folder / INDEX).write_bytes(msgspec.json.encode(index) + b"\n")
    (folder / LINES).unlink()
    if not boot_id():
        reach_disk(folder)


def _line(value: _Head | _Line) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _written(parts: Sequence[tuple[str, ...]], folder: Path) -> list[_Line]:
    """What an interrupted call has written since the machine was started: later, some may not be there."""
    try:
        head, *others = (folder / LINES).read_bytes().splitlines()
        size = (folder / PANELS).stat().st_size
    except (OSError, ValueError):
        return []
    if not boot_id() or _read(head, _Head) != _Head(LAYOUT, boot_id()):
        return []
    lines = (_read(text, _Line) for text in others)
    both = zip(parts, lines, strict=False)
    # The first that is cut off, or of another matrix, ends what is whole.
    whole = itertools.takewhile(lambda one: one[1] and one[1].names == one[0] and one[1].end <= size, both)
    return [line for _, line in whole if line is not None]


def _read(text: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError:
        return None


def reading_order(name: str) -> tuple[str, int, str]:
    """Sorts names of modules so that what is read as one lies side by side."""
    parent, _, last = name.rpartition(".")
    return parent, _READ_AS_ONE.get(last, len(_READ_AS_ONE)), last


def read_panels(folder: Path, *, is_checked: bool = True) -> dict[str, PanelWeights]:
    """Map a folder's panels, by the name of their module; none where it has none that can be used.

    Panels of another layout, a file of another length than the index says, one that may not have reached the
    disk before the machine lost its power, or (where `is_checked`) another checksum count as none: whoever
    asked builds them again.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        is_whole = index["layout"] == LAYOUT and index["bytes"] == (folder / PANELS).stat().st_size
        if not is_whole or not _is_safe(folder, index["boot"]):
            return {}
        if is_checked and index["crc32"] != checksum(folder / PANELS):
            return {}
        return _mapped(folder / PANELS, index["tensors"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _is_safe(folder: Path, boot: str) -> bool:
    """Whether the panels are on the disk, or were written since the machine was started.

    A first load does not wait for the disk, which may take seconds for each gigabyte; a later one that finds
    all written back vouches for it.
    """
    if (folder / ON_DISK).exists():
        return True
    if boot != boot_id() or not boot:
        return False
    if time.time() - (folder / INDEX).stat().st_mtime > _WRITTEN_BACK_S and os.access(folder, os.W_OK):
        with suppress(OSError):  # no room, or too many files: they stay what they are
            reach_disk(folder)
    return True


def reach_disk(folder: Path) -> None:
    """Wait until a folder's panels are on the disk, from where on they outlive the machine's power.

    Raises:
        OSError: they are not there, or cannot be written.
    """
    with (folder / PANELS).open("ab") as file:
        os.fsync(file.fileno())
    (folder / ON_DISK).touch()


def boot_id() -> str:
    """What tells the starts of a machine apart; nothing where the system does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


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
