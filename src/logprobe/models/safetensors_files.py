"""Read and write safetensors files as NumPy arrays.

Format: https://huggingface.co/docs/safetensors. The `safetensors` package checks a file's header and writes
files. This module maps the arrays itself, because the package would copy them.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[Any]

_LENGTH_BYTES: Final = 8  # a file begins with the length of its header, little-endian
_METADATA: Final = "__metadata__"
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
        "C64": np.complex64,
    }.items()
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    path: Path
    name: str
    type_name: str  # as in the file, such as `BF16`
    shape: tuple[int, ...]
    start: int  # position of the first byte in the file

    def read(self) -> Array:
        """Map the tensor into memory, copy-on-write; the mapping is closed when the array is freed.

        Raises:
            UnsupportedModelError: NumPy has no such dtype.
        """
        dtype = DTYPES.get(self.type_name)
        if dtype is None:
            raise UnsupportedModelError(
                f"{self.path}: {self.name} has the dtype {self.type_name}, which is not supported; use a "
                "checkpoint in bfloat16, float16 or float32"
            )
        num_bytes = prod(self.shape) * dtype.itemsize
        if not num_bytes:  # which cannot be mapped
            return np.empty(self.shape, dtype)
        data = np.memmap(self.path, np.uint8, "c", self.start, num_bytes)
        return np.asarray(data).view(dtype).reshape(self.shape)


def tensors_of(path: Path) -> tuple[dict[str, StoredTensor], Mapping[str, str]]:
    """Return the tensors of a safetensors file by name, and the file's metadata.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: the file is not a valid safetensors file.
    """
    from safetensors import safe_open

    with safe_open(path, framework="np"):  # checks the header, and the length of the file
        pass
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    metadata: Mapping[str, str] = header.pop(_METADATA, {})
    first = _LENGTH_BYTES + length
    tensors = {
        name: StoredTensor(path, name, entry["dtype"], (*entry["shape"],), first + entry["data_offsets"][0])
        for name, entry in header.items()
    }
    return tensors, metadata


def save_tensors(tensors: Mapping[str, Array], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, with permissions as set by the umask.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors import SafetensorError, TensorSpec, serialize_file

    path.touch()
    mode = path.stat().st_mode
    whole = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in whole.items()
    }
    try:
        serialize_file(specs, path, metadata)  # creates the file with mode 0600
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error
    path.chmod(mode)
