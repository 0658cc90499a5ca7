"""The record of a model's first load here: what was proven of it, for the next load to build on.

One file holds the record, as JSON of the caller's schema, and its tensors: the small ones of the model
(norms, biases, rotary frequencies), and some of transformers' own logits, which every later load has to give.
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
    """Write record and tensors as one file.

    Raises:
        OSError: the folder cannot be written.
    """
    metadata = {_KEY: record}
    save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, metadata)


def read_record(folder: Path) -> tuple[str, dict[str, Tensor]] | None:
    """Return record and tensors; None if there are none, or they cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / FILE, framework="pt") as file:
            record = (file.metadata() or {})[_KEY]
            return record, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError):
        return None
