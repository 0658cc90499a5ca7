"""The record of a model's first, verified load, from which later loads are built.

One file contains the record, JSON text whose schema the caller defines, and tensors: the model's small
tensors (norms, biases, rotary frequencies) and some of transformers' logits, which every later load must
reproduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe.errors import UnsupportedModelError
from logprobe.models.safetensors_files import save_tensors, tensors_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from logprobe.kernels.arrays import Array

FILE: Final = "load.safetensors"
_KEY: Final = "record"


def write_record(folder: Path, record: str, tensors: Mapping[str, Array]) -> None:
    """Write a record and its tensors to one file.

    Raises:
        OSError: the folder cannot be written.
    """
    save_tensors(tensors, folder / FILE, {_KEY: record})


def read_record(folder: Path) -> tuple[str, dict[str, Array]] | None:
    """Return the record and its tensors; None if there is no record or the file cannot be read."""
    from safetensors import SafetensorError

    try:
        tensors, metadata = tensors_of(folder / FILE)
        # Copied, because mapped arrays would keep the file open.
        return metadata[_KEY], {name: np.array(tensor.read()) for name, tensor in tensors.items()}
    except (OSError, KeyError, ValueError, SafetensorError, UnsupportedModelError):
        return None
