"""`LoadRecord`: what was proven of a model at its first load here, for the next load to build on.

The record names sizes and rules of a decoder of the usual form; the file that holds it has the small tensors
(norms, biases, rotary frequencies) and some of transformers' own logits, which every later load must meet.
Before it: a proven load. After it: a load that needs no transformers module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

FILE: Final = "load.safetensors"
_KEY: Final = "record"


class Rule(msgspec.Struct, frozen=True):
    """How a layer weighs the tokens that it attends to."""

    scale: float
    window: int | None


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of the usual form; shapes of its matrices are those of its panels."""

    num_layers: int
    key_dim: int
    context_len: int
    eos_token_ids: list[int]
    rules: list[Rule]  # by layer
    epsilons: dict[str, float]  # by the name of the norm
    rope_scaling: float
    is_tied: bool  # whether the output head has the embedding's weights
    probe_difference: float  # nats
    num_references: int
    is_recorded: bool  # whether the steps of few rows run as one launch


def write_record(folder: Path, record: LoadRecord, tensors: dict[str, Tensor]) -> None:
    """Write record and tensors as one file.

    Raises:
        OSError: the folder cannot be written.
    """
    from safetensors.torch import save_file

    metadata = {_KEY: msgspec.json.encode(record).decode()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, metadata)


def read_record(folder: Path) -> tuple[LoadRecord, dict[str, Tensor]] | None:
    """Record and tensors; None where there are none, or none that can be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / FILE, framework="pt") as file:
            record = msgspec.json.decode((file.metadata() or {})[_KEY], type=LoadRecord)
            return record, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError):
        return None
