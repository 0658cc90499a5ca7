"""Quantised blocks of GGUF files → panels that widen to the very numbers of `gguf`'s own dequantisation.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Four bits stay four; five and
six become eight, since a panel has no such fields. Before it: a tensor's raw rows. After it: `panels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.layers.forms import pack_nibbles, pack_octets

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from logprobe.kernels.layers.forms import PanelWeights

    Array = NDArray[Any]

LARGEST_EIGHTH = 65504 / 8  # scales beyond it leave float16 when they are multiplied by 8


def panels_of_blocks(raw: Array, type_name: str) -> PanelWeights | None:
    """Panels of a tensor's rows; None where its type has no form here.

    Args:
        raw: (outputs, bytes of a row) uint8, as `gguf.GGUFReader` gives them.
        type_name: of the tensor's quantisation, for example `Q4_1`.
    """
    read = _READERS.get(type_name)
    if read is None:
        return None
    block_bytes, unpack = read
    panels: PanelWeights | None = unpack(raw.reshape(len(raw), -1, block_bytes))
    return panels


def _halves(blocks: Array, start: int) -> Array:
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _low_and_high(packed: Array) -> Array:
    """Low nibbles of all bytes, and then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: Array) -> PanelWeights | None:
    scales = _halves(blocks, 0)
    if np.abs(scales).max() > LARGEST_EIGHTH:
        return None
    return pack_nibbles(_low_and_high(blocks[..., 2:]), scales, scales * np.float16(-8))


def _q4_1(blocks: Array) -> PanelWeights | None:
    return pack_nibbles(_low_and_high(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Array) -> PanelWeights | None:
    fifths = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    values = (_low_and_high(blocks[..., 6:]) | fifths << 4).astype(np.int8) - np.int8(16)
    return pack_octets(values, _halves(blocks, 0))


def _q8_0(blocks: Array) -> PanelWeights | None:
    return pack_octets(blocks[..., 2:].view(np.int8), _halves(blocks, 0))


def _q4_k(blocks: Array) -> PanelWeights | None:
    """Blocks of 256: eight scales and eight summands of six bits each, over two of float16."""
    num_outputs = len(blocks)
    fields = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4)
    low, middle, high = fields[..., 0, :], fields[..., 1, :], fields[..., 2, :]
    scales = np.concatenate([low & 63, (high & 15) | low >> 6 << 4], axis=-1)
    summands = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    wide_scales = _halves(blocks, 0)[..., None].astype(np.float32) * scales
    wide_summands = -(_halves(blocks, 2)[..., None].astype(np.float32) * summands)
    chunks = blocks[..., 16:].reshape(num_outputs, -1, 4, 32)
    values = np.stack([chunks & 15, chunks >> 4], axis=3).reshape(num_outputs, -1, 32)
    return pack_nibbles(values, wide_scales.reshape(num_outputs, -1), wide_summands.reshape(num_outputs, -1))


def _q6_k(blocks: Array) -> PanelWeights | None:
    """Blocks of 256: four low bits, two high ones, and a scale of eight bits for each 16 values."""
    num_outputs = len(blocks)
    low = blocks[..., :128].reshape(num_outputs, -1, 2, 2, 32)  # halves of a block, halves of those
    high = blocks[..., 128:192].reshape(num_outputs, -1, 2, 1, 32)
    fours = np.stack([low & 15, low >> 4], axis=3).reshape(num_outputs, -1, 2, 4, 32)
    twos = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    values = (fours | twos << 4).astype(np.int8) - np.int8(32)
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)[..., None]
    return pack_octets(
        values.reshape(num_outputs, -1, 16), scales.astype(np.float32).reshape(num_outputs, -1)
    )


_READERS: dict[str, tuple[int, Any]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}
