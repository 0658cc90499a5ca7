"""`LoadRecord`: what was proven of a model at its first load here, for the next load to build on.

The record says how its decoder is put together; the file that holds it has the small tensors (norms, biases,
rotary frequencies) and some of transformers' own logits, which every later load must meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from logprobe.models.loading import save_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

FILE: Final = "load.safetensors"
_KEY: Final = "record"


class Rule(msgspec.Struct, frozen=True):
    """How a layer weighs the tokens that it attends to."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one model that no tensor holds."""

    embedding: float = 1.0  # that embeddings are multiplied by
    residual: float = 1.0  # that attention and feed-forward part are multiplied by before they are added
    logits: float = 1.0  # that logits are multiplied by
    softcap: float | None = None  # of the logits: softcap · tanh(logits / softcap)
    queries: tuple[float, int] | None = None  # (beta, n): queries · (1 + beta · ln(1 + ⌊position / n⌋))


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One model's decoder; shapes of its matrices are those of its panels."""

    family: str  # transformers' `model_type`
    path: str  # of the decoder in transformers' module
    head: str  # the output head's name there
    head_dim: int
    epsilon: float
    activation: str
    is_parallel: bool
    factors: Factors
    rules: list[Rule]  # by layer
    rotary: list[str | None]  # by layer: which frequencies it rotates by; None: it does not
    rotary_scaling: dict[str, float]  # by frequencies
    rope_boundary: int | None  # tokens above which a text runs under other frequencies
    experts_per_token: int = 0
    normalises_experts: bool = False  # whether the weights of a token's experts add up to 1


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose numbers were proven."""

    decoder: DecoderSpec
    context_len: int
    eos_token_ids: list[int]
    probe_difference: float  # nats
    num_references: int


def write_record(folder: Path, record: LoadRecord, tensors: dict[str, Tensor]) -> None:
    """Write record and tensors as one file.

    Raises:
        OSError: the folder cannot be written.
    """
    metadata = {_KEY: msgspec.json.encode(record).decode()}
    save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, metadata)


def read_record(folder: Path) -> tuple[LoadRecord, dict[str, Tensor]] | None:
    """Record and tensors; None where there are none, or none that can be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / FILE, framework="pt") as file:
            record = msgspec.json.decode((file.metadata() or {})[_KEY], type=LoadRecord)
            return record, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError):
        return None
