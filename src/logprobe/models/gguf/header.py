"""A GGUF file's header, believed as far as the file's bytes go: where its tensors lie, and of which types.

Before it: any bytes. After it: `file`; the reader of its keys takes as many entries as a count tells it to,
in the file or not. Every count is held against the bytes that are there.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from logprobe.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

MAGIC: Final = b"GGUF"
STRING, ARRAY = 8, 9
SCALAR_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
MAX_ENTRIES: Final = 1 << 22  # of all arrays; vocabularies and their merges have some hundred thousand
MAX_DIMENSIONS: Final = 4  # as in ggml
NUMBER_BYTES: Final = 8  # of the widest number: a tensor begins at a multiple of it


ARCHITECTURE_KEY, ALIGNMENT_KEY = b"general.architecture", b"general.alignment"
DEFAULT_ALIGNMENT: Final = 32  # bytes; where the key says nothing
UINT32: Final = 4


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of a file."""

    type_name: str  # of its numbers: `F32`, or that of a quantisation
    shape: tuple[int, ...]  # outermost dimension first
    start: int  # bytes from the file's beginning
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of its tensors, and the name of its architecture; None where it has none."""

    architecture: str | None
    tensors: dict[str, TensorPlace]


def read_header(path: Path) -> Header:
    """Walk through a file's keys and tensors once.

    Raises:
        InputError: it is no GGUF file, is cut off, or holds what no such file holds.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if not size:
            raise InputError(f"{path}: is empty; fetch it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(path, data, size).read()


class _Walk:
    """A place in the file, and what was read on the way there."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._at = 0
        self._num_entries = 0
        self._architecture: str | None = None
        self._alignment = DEFAULT_ALIGNMENT

    def read(self) -> Header:
        """Everything up to the tensors' numbers."""
        if self._take(4) != MAGIC:
            raise self._error("does not begin as one")
        version, num_tensors, num_keys = self._number("<I"), self._number("<Q"), self._number("<Q")
        if version not in {2, 3}:
            raise self._error(f"has version {version}; 2 and 3 are read")
        for _ in range(num_keys):
            self._take_key()
        places: dict[str, TensorPlace] = {}
        for _ in range(num_tensors):
            name, place = self._take_tensor()
            if name in places:
                raise self._error(f"has two tensors {name!r:.80}")
            places[name] = place
        begin = self._at + -self._at % self._alignment
        if begin + max((place.start + place.num_bytes for place in places.values()), default=0) > self._size:
            raise self._error("ends before its tensors do")
        tensors = {name: replace(place, start=begin + place.start) for name, place in places.items()}
        return Header(self._architecture, tensors)

    def _take_key(self) -> None:
        key = self._bytes(self._number("<Q"))
        kind = self._number("<I")
        if key == ARCHITECTURE_KEY and kind == STRING and self._architecture is None:
            self._architecture = self._bytes(self._number("<Q")).decode("utf-8", "replace")
        elif key == ALIGNMENT_KEY and kind == UINT32:
            self._alignment = self._number("<I")
            if not self._alignment or self._alignment % NUMBER_BYTES:
                raise self._error(f"has an alignment of {self._alignment} bytes")
        else:
            self._skip_value(kind)

    def _skip_value(self, kind: int) -> None:
        if kind == STRING:
            self._skip_string()
        elif kind == ARRAY:
            self._skip_array(self._number("<I"), self._number("<Q"))
        else:
            self._take(self._scalar_bytes(kind))

    def _skip_array(self, kind: int, count: int) -> None:
        self._num_entries += count
        if self._num_entries > MAX_ENTRIES:
            raise self._error(f"has arrays of more than {MAX_ENTRIES} entries")
        if kind == ARRAY:
            raise self._error("holds an array of arrays")
        if kind != STRING:
            self._take(count * self._scalar_bytes(kind))
            return
        for _ in range(count):
            self._skip_string()

    def _take_tensor(self) -> tuple[str, TensorPlace]:
        """A tensor's name, and its place from where the numbers of all begin."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._bytes(self._number("<Q")).decode("utf-8", "replace")
        num_dimensions = self._number("<I")
        if num_dimensions > MAX_DIMENSIONS:
            raise self._error(f"has a tensor of {num_dimensions} dimensions")
        shape = [self._number("<Q") for _ in range(num_dimensions)]
        number, start = self._number("<I"), self._number("<Q")
        try:
            kind = GGMLQuantizationType(number)
            block_len, block_bytes = GGML_QUANT_SIZES[kind]
        except (KeyError, ValueError) as error:
            raise self._error(f"has a tensor of the unknown type {number}") from error
        num_values = math.prod(shape)
        if not shape or not num_values or shape[0] % block_len:
            raise self._error(f"has a tensor of the shape {shape}, which its type does not allow")
        if start % NUMBER_BYTES:
            raise self._error(f"has a tensor at the odd place {start}")
        return name, TensorPlace(kind.name, tuple(shape[::-1]), start, num_values // block_len * block_bytes)

    def _scalar_bytes(self, kind: int) -> int:
        if kind not in SCALAR_BYTES:
            raise self._error(f"has a value of the unknown type {kind}")
        return SCALAR_BYTES[kind]

    def _skip_string(self) -> None:
        self._take(self._number("<Q"))

    def _number(self, form: str) -> int:
        number: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return number

    def _bytes(self, count: int) -> bytes:
        start = self._at
        self._take(count)
        return self._data[start : self._at]

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._error("ends before its header does")
        part = self._data[self._at : end] if count <= 8 else b""
        self._at = end
        return part

    def _error(self, what: str) -> InputError:
        return InputError(f"{self._path}: not a readable GGUF file: it {what}; fetch it again")
