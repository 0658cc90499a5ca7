"""Parse the header of a GGUF file: the metadata and the tensors' types, shapes and offsets.

Every count is checked against the size of the file before anything is allocated. The `gguf` package's reader
trusts the counts, and takes seconds for a vocabulary of 128,256 tokens (two arrays per entry).
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
LENGTH: Final = struct.Struct("<Q")  # length of a string in bytes
# limit for all arrays together; vocabularies and merges have a few hundred thousand
MAX_ENTRIES: Final = 1 << 22
MAX_DIMENSIONS: Final = 4  # as in ggml
NUMBER_BYTES: Final = 8  # size of the widest number, which is the smallest alignment allowed
ALIGNMENT_KEY: Final = "general.alignment"
DEFAULT_ALIGNMENT: Final = 32  # in bytes, if the file has no such key


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Type, shape and position of one tensor in the file."""

    type_name: str  # `F32`, or a quantization type
    shape: tuple[int, ...]  # outermost dimension first
    start: int  # byte offset from the beginning of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata of a file as Python numbers, strings and lists, and its tensors by name."""

    keys: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_header(path: Path) -> Header:
    """Read a GGUF file's header.

    Raises:
        InputError: the file is not a GGUF file, is truncated, or its header is not valid.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if not size:
            raise InputError(f"{path}: is empty; fetch it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(path, data, size).read()


class _Walk:
    """A cursor over the bytes of a header."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._at = 0
        self._num_entries = 0

    def read(self) -> Header:
        """Read everything before the tensor data."""
        if self._size < 4 or self._bytes(4) != MAGIC:
            raise self._error("does not start with 'GGUF'")
        version, num_tensors, num_keys = self._number("<I"), self._number("<Q"), self._number("<Q")
        if version not in {2, 3}:
            raise self._error(f"has version {version}, but only versions 2 and 3 are supported")
        keys: dict[str, Any] = {}
        for _ in range(num_keys):
            [key] = self._strings(1)
            if key in keys:
                raise self._error(f"has the key {key!r:.80} twice")
            keys[key] = self._value(self._number("<I"))
        places: dict[str, TensorPlace] = {}
        for _ in range(num_tensors):
            name, place = self._take_tensor()
            if name in places:
                raise self._error(f"has the tensor {name!r:.80} twice")
            places[name] = place
        alignment = keys.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < NUMBER_BYTES or alignment & (alignment - 1):
            raise self._error(f"has an invalid alignment of {alignment!r:.80} bytes")
        begin = self._at + -self._at % alignment
        end = 0
        for name, place in sorted(places.items(), key=lambda item: item[1].start):
            if place.start % alignment:
                raise self._error(f"has the tensor {name!r:.80} at the unaligned offset {place.start}")
            if place.start < end:
                raise self._error(f"has the tensor {name!r:.80}, which overlaps another one")
            end = place.start + place.num_bytes
        if begin + end > self._size:
            raise self._error("is truncated within its tensors")
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
            raise InputError(f"{self._path}: has an array of arrays in its metadata, which is not supported")
        return self._strings(count) if kind == STRING else self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise self._error(f"has a value with the unknown type {kind}")
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
            raise self._error("has a string that is not valid UTF-8") from error
        self._move_to(at)
        return found

    def _take_tensor(self) -> tuple[str, TensorPlace]:
        """Read a tensor's name and entry, with `start` relative to the beginning of the tensor data."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        [name] = self._strings(1)
        num_dimensions = self._number("<I")
        if num_dimensions > MAX_DIMENSIONS:
            raise self._error(f"has a tensor with {num_dimensions} dimensions")
        shape = [self._number("<Q") for _ in range(num_dimensions)]
        number, start = self._number("<I"), self._number("<Q")
        try:
            kind = GGMLQuantizationType(number)
            block_len, block_bytes = GGML_QUANT_SIZES[kind]
        except (KeyError, ValueError) as error:
            remedy = "upgrade gguf, or fetch the file again"
            problem = f"has a tensor of type {number}, which the installed gguf package does not know"
            raise InputError(f"{self._path}: {problem}; {remedy}") from error
        num_values = math.prod(shape)
        if not shape or not num_values or shape[0] % block_len:
            raise self._error(f"has a tensor with the shape {shape}, which its type does not allow")
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
            raise self._error("is truncated within its header")
        self._at = end

    def _error(self, what: str) -> InputError:
        return InputError(f"{self._path}: is not a valid GGUF file: it {what}; fetch it again")
