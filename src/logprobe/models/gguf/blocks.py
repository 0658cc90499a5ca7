"""Repack quantized GGUF blocks into panels that dequantize to exactly the values of the `gguf` package.

Panels are the weight tiles that the CPU kernels read. 4-bit types stay 4-bit; 5- and 6-bit types become int8,
because panels have no 5- or 6-bit format. Block layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.layers.forms import empty_panels, fill_blocks
from logprobe.kernels.layers.layout import INT4, INT4_WIDE, INT8, INT8_WIDE, PANEL, Form

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from logprobe.kernels.layers.forms import PanelWeights

    Array = NDArray[Any]

LARGEST_EIGHTH = 65504 / 8  # a larger scale, times 8, overflows float16
CHUNK_NUMBERS = 1 << 18  # weights unpacked at a time, so that intermediate arrays fit in the CPU cache


def panels_of_blocks(raw: Array, type_name: str, order: Array | None = None) -> PanelWeights | None:
    """Repack the rows of a tensor as panels; return None if its values have no panel format.

    Args:
        raw: (num_outputs, bytes per row) uint8, as `gguf.GGUFReader` returns them.
        type_name: the tensor's quantization type, for example `Q4_1`.
        order: (num_outputs,) integers, the row in `raw` for each output; None keeps the order of `raw`.
    """
    layout = _LAYOUTS.get(type_name)
    if layout is None:
        return None
    num_outputs = len(raw)
    blocks = raw.reshape(num_outputs, -1, layout.block_bytes)
    if type_name == "Q4_0" and np.abs(_halves(blocks, 0)).max() > LARGEST_EIGHTH:
        return None
    panels = empty_panels(layout.form, num_outputs, blocks.shape[1] * layout.inputs)
    step = PANEL * max(1, CHUNK_NUMBERS // (PANEL * panels.num_inputs))
    for start in range(0, num_outputs, step):
        rows = slice(start, start + step)
        header, groups = layout.unpack(blocks[rows if order is None else order[rows]])
        fill_blocks(panels, start, header, groups)
    return panels


def _halves(blocks: Array, start: int) -> Array:
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _low_and_high(packed: Array) -> Array:
    """Split bytes, (..., n) uint8, into their low and high four bits, (..., 2, n) uint8."""
    values = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=values[..., 0, :])
    np.right_shift(packed, 4, out=values[..., 1, :])
    return values


def _int4(packed: Array) -> Array:
    """Split like `_low_and_high`, but pack eight 4-bit values into each element: (..., 2, n / 8) uint32."""
    twos = np.ascontiguousarray(packed).view(np.uint16)
    values = np.empty((*twos.shape[:-1], 2, twos.shape[-1]), np.uint8)
    values[..., 0, :] = twos & 0x0F | twos >> 4 & 0xF0
    values[..., 1, :] = twos >> 4 & 0x0F | twos >> 8 & 0xF0
    return values.view(np.uint32)


def _q4_0(blocks: Array) -> tuple[Array, Array]:
    scales = _halves(blocks, 0)
    return np.stack([scales, scales * np.float16(-8)], axis=-1), _fours(blocks[..., 2:])


def _q4_1(blocks: Array) -> tuple[Array, Array]:
    return np.ascontiguousarray(blocks[..., :4]).view(np.float16), _fours(blocks[..., 4:])


def _fours(packed: Array) -> Array:
    """Unpack 4-bit values in blocks of 32 inputs: (rows, blocks, 16) uint8 to (rows, blocks, 4) uint32."""
    return _int4(packed).reshape(*packed.shape[:2], 4)


def _q5_0(blocks: Array) -> tuple[Array, Array]:
    fifths = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    fifths <<= 4
    values = _low_and_high(blocks[..., 6:]).reshape(fifths.shape)
    values |= fifths
    return _halves(blocks, 0)[..., None], values.view(np.int8) - np.int8(16)


def _q8_0(blocks: Array) -> tuple[Array, Array]:
    return _halves(blocks, 0)[..., None], blocks[..., 2:].view(np.int8)


def _q4_k(blocks: Array) -> tuple[Array, Array]:
    """Unpack blocks of 256 inputs with eight 6-bit scales and eight 6-bit minimums, times float16 factors."""
    fields = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4)
    low, middle, high = fields[..., 0, :], fields[..., 1, :], fields[..., 2, :]
    scales = np.concatenate([low & 63, (high & 15) | low >> 6 << 4], axis=-1)
    summands = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    wide_scales = _halves(blocks, 0)[..., None].astype(np.float32) * scales
    wide_summands = -(_halves(blocks, 2)[..., None].astype(np.float32) * summands)
    header = np.stack([wide_scales, wide_summands], axis=-1)
    groups = _int4(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return header.reshape(len(blocks), -1, 2), groups.reshape(len(blocks), -1, 4)


def _q6_k(blocks: Array) -> tuple[Array, Array]:
    """Unpack blocks of 256 inputs with 4 + 2 bits per value and an 8-bit scale per 16 values."""
    low = _low_and_high(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))  # per half of a block
    fours = low.reshape(*blocks.shape[:2], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
    for place in range(4):
        fours[..., place, :] |= (high >> 2 * place & 3) << 4
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)[..., None]
    values = fours.view(np.int8)
    values -= np.int8(32)
    return scales.reshape(len(blocks), -1, 1), values.reshape(len(blocks), -1, 16)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Block layout of a quantization type, and a function that unpacks blocks to panel headers and groups."""

    inputs: int
    block_bytes: int
    form: Form
    unpack: Callable[[Array], tuple[Array, Array]]


_LAYOUTS = {
    "Q4_0": _Layout(32, 18, INT4, _q4_0),
    "Q4_1": _Layout(32, 20, INT4, _q4_1),
    "Q5_0": _Layout(32, 22, INT8, _q5_0),
    "Q8_0": _Layout(32, 34, INT8, _q8_0),
    "Q4_K": _Layout(256, 144, INT4_WIDE, _q4_k),
    "Q6_K": _Layout(256, 210, INT8_WIDE, _q6_k),
}
