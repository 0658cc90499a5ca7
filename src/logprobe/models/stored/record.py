"""The record of a model's first, verified load, from which later loads are built.

One file contains the record, JSON text whose schema the caller defines, and tensors: the model's small
tensors (norms, biases, rotary frequencies) and some of transformers' logits, which every later load must
reproduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logprobe.models.loading import save_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

FILE: Final = "load.safetensors"
_KEY: Final = "record"


def write_record(folder: Path, record: str, tensors: dict[str, Tensor]) -> None:
    """Write a record and its tensors to one file.

    Raises:
        OSError: the folder cannot be written.
    """
    metadata = {_KEY: record}
    save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, metadata)


def read_record(folder: Path) -> tuple[str, dict[str, Tensor]] | None:
    """Return the record and its tensors; None if there is no record or the file cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / FILE, framework="pt") as file:
            record = (file.metadata() or {})[_KEY]
            return record, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError):
        return None
