"""A GGUF file's header, believed as far as the file's bytes go: its keys' values, and where its tensors lie.

Before it: any bytes. After it: `file`. The gguf package's reader takes as many entries as a count tells it
to, in the file or not, and seconds for a vocabulary of 128,256 (it makes two arrays of each). Here every
count is held against the bytes that are there.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

MAGIC: Final = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS: Final = {
    number: np.dtype(name)
    for number, name in {
        0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
        10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip
LENGTH: Final = struct.Struct("<Q")  # of a string, in bytes
MAX_ENTRIES: Final = 1 << 22  # of all arrays; vocabularies and their merges have some hundred thousand
MAX_DIMENSIONS: Final = 4  # as in ggml
NUMBER_BYTES: Final = 8  # of the widest number: the least alignment
ALIGNMENT_KEY: Final = "general.alignment"
DEFAULT_ALIGNMENT: Final = 32  # bytes; where the key says nothing


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of a file."""

    type_name: str  # of its numbers: `F32`, or that of a quantisation
    shape: tuple[int, ...]  # outermost dimension first
    start: int  # bytes from the file's beginning
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself: its keys as Python numbers, strings and lists, and its tensors."""

    keys: dict[str, Any]
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

    def read(self) -> Header:
        """Everything up to the tensors' numbers."""
        if self._size < 4 or self._bytes(4) != MAGIC:
            raise self._error("does not begin as one")
        version, num_tensors, num_keys = self._number("<I"), self._number("<Q"), self._number("<Q")
        if version not in {2, 3}:
            raise self._error(f"has version {version}; 2 and 3 are read")
        keys: dict[str, Any] = {}
        for _ in range(num_keys):
            [key] = self._strings(1)
            if key in keys:
                raise self._error(f"has two keys {key!r:.80}")
            keys[key] = self._value(self._number("<I"))
        places: dict[str, TensorPlace] = {}
        for _ in range(num_tensors):
            name, place = self._take_tensor()
            if name in places:
                raise self._error(f"has two tensors {name!r:.80}")
            places[name] = place
        alignment = keys.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < NUMBER_BYTES or alignment & (alignment - 1):
            raise self._error(f"has an alignment of {alignment!r:.80} bytes")
        begin = self._at + -self._at % alignment
        end = 0
        for name, place in sorted(places.items(), key=lambda item: item[1].start):
            if place.start % alignment:
                raise self._error(f"has the tensor {name!r:.80} at the odd place {place.start}")
            if place.start < end:
                raise self._error(f"has the tensor {name!r:.80} where another one lies")
            end = place.start + place.num_bytes
        if begin + end > self._size:
            raise self._error("ends before its tensors do")
        tensors = {name: replace(place, start=begin + place.start) for name, place in places.items()}
        return Header(keys, tensors)

    def _value(self, kind: int) -> Any:
        if kind == ARRAY:
            return self._array(self._number("<I"), self._number("<Q"))
        [value] = self._strings(1) if kind == STRING else self._scalars(kind, 1)
        return value

    def _array(self, kind: int, count: int) -> list[Any]:
        self._num_entries += count
        if self._num_entries > MAX_ENTRIES:
            raise self._error(f"has arrays of more than {MAX_ENTRIES} entries")
        if kind == ARRAY:
            raise self._error("holds an array of arrays")
        return self._strings(count) if kind == STRING else self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise self._error(f"has a value of the unknown type {kind}")
        values: list[Any] = np.frombuffer(self._bytes(count * SCALARS[kind].itemsize), SCALARS[kind]).tolist()
        return values

    def _strings(self, count: int) -> list[str]:
        data, at, found = self._data, self._at, []
        try:
            for _ in range(count):
                start = at + LENGTH.size
                at = start + LENGTH.unpack_from(data, at)[0]
                if at > self._size:
                    break
                found.append(data[start:at].decode())
        except struct.error:
            at = self._size + 1
        except UnicodeDecodeError as error:
            raise self._error("holds a text that is no UTF-8") from error
        self._move_to(at)
        return found

    def _take_tensor(self) -> tuple[str, TensorPlace]:
        """A tensor's name, and its place from where the numbers of all begin."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        [name] = self._strings(1)
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
        return name, TensorPlace(kind.name, tuple(shape[::-1]), start, num_values // block_len * block_bytes)

    def _number(self, form: str) -> int:
        number: int = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return number

    def _bytes(self, count: int) -> bytes:
        start = self._at
        self._move_to(start + count)
        return self._data[start : self._at]

    def _move_to(self, end: int) -> None:
        if end > self._size:
            raise self._error("ends before its header does")
        self._at = end

    def _error(self, what: str) -> InputError:
        return InputError(f"{self._path}: not a readable GGUF file: it {what}; fetch it again")
