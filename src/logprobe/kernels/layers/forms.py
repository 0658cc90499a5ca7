"""Packs weights into panels, and unpacks them row by row (the reference for the kernels' conversions).

`layout` defines the memory layout of each weight format ("form").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.arrays import as_array
from logprobe.kernels.layers.layout import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT4,
    INT4_WIDE,
    INT8,
    INT8_WIDE,
    LINE,
    PANEL,
    Form,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from logprobe.kernels.arrays import Array

PIECE_NUMBERS = 1 << 20  # number of weights that are checked at a time, so that they stay in the cache
FLOATS = {"float32", "float16", "bfloat16"}  # dtypes of weights that need no conversion
STEP = 32  # the number of inputs is padded to a multiple of this, which is a multiple of every form's block


@dataclass(frozen=True, eq=False)
class PanelWeights:
    """Weights of a linear layer as panels of PANEL outputs; outputs and inputs are padded with zeros."""

    form: Form
    num_outputs: int
    num_inputs: int
    data: Array  # uint8, the panels one after another
    bias: Array | None = None  # (outputs,) float32
    arithmetic: str = "fma"  # of products with these weights, `fma` or `bf16x3`

    def __post_init__(self) -> None:
        """Convert CPU tensors to arrays that share their memory."""
        object.__setattr__(self, "data", as_array(self.data))
        if self.bias is not None:
            object.__setattr__(self, "bias", as_array(self.bias))

    @cached_property
    def padded_inputs(self) -> int:
        """Number of inputs including padding."""
        return self.num_inputs + -self.num_inputs % STEP

    @cached_property
    def panel_bytes(self) -> int:
        """Size of one panel, in bytes."""
        return self.form.panel_bytes(self.padded_inputs)

    @property
    def num_bytes(self) -> int:
        """Size of all panels, in bytes."""
        return -(-self.num_outputs // PANEL) * self.panel_bytes

    @property
    def address(self) -> int:
        """Address of the first panel in memory; modules that share a matrix share its panels."""
        return address_of(self.data)

    def multiplied_by(self, arithmetic: str) -> PanelWeights:
        """Return the same weights for products with `arithmetic`, or unchanged if it lacks their form."""
        # Three products of bfloat16 numbers are not enough for weights of more than 8 significant bits.
        is_unchanged = arithmetic == self.arithmetic or self.form in {FLOAT32, FLOAT16}
        return self if is_unchanged else replace(self, arithmetic=arithmetic)

    def with_bias(self, bias: Array) -> PanelWeights:
        """Return the same weights with a bias."""
        return replace(self, bias=bias)

    def rows(self, outputs: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the weights of the given outputs, (len(outputs), inputs) float32."""
        data = self.data.reshape(-1, self.panel_bytes)
        rows: NDArray[np.float32] = _READERS[self.form.name](data, *np.divmod(outputs, PANEL))
        return rows[:, : self.num_inputs]

    def halves(self) -> tuple[PanelWeights, PanelWeights] | None:
        """Return the first and the second half of the outputs as views; None if a panel would be split."""
        half, rest = divmod(self.num_outputs, 2)
        if rest or half % PANEL:
            return None
        biases = (None, None) if self.bias is None else np.split(self.bias, 2)
        data = np.split(self.data[: self.num_bytes], 2)
        first, second = (
            replace(self, num_outputs=half, data=part, bias=bias)
            for part, bias in zip(data, biases, strict=True)
        )
        return first, second

    def joined(self, others: list[PanelWeights]) -> PanelWeights | None:
        """Return one layer with the outputs of this layer and `others`.

        Returns None if forms or numbers of inputs differ, or if a layer before the last has a partly filled
        panel.
        """
        parts = [self, *others]
        are_whole = all(part.num_outputs % PANEL == 0 for part in parts[:-1])
        if not are_whole or len({(part.form.name, part.num_inputs) for part in parts}) > 1:
            return None
        bias = None
        if any(part.bias is not None for part in parts):
            bias = np.concatenate([_bias_of(part) for part in parts])
        num_outputs = sum(part.num_outputs for part in parts)
        data = _end_to_end([part.data for part in parts])
        return replace(self, num_outputs=num_outputs, data=data, bias=bias)


def arithmetic_of(panels: Iterable[PanelWeights]) -> str:
    """Return the arithmetic of products with a model's matrices: `bf16x3` if any uses it, else `fma`."""
    return "bf16x3" if any(one.arithmetic == "bf16x3" for one in panels) else "fma"


def address_of(array: Array) -> int:
    """Return the address of an array's first element in memory."""
    address: int = array.__array_interface__["data"][0]
    return address


def _bias_of(part: PanelWeights) -> Array:
    return np.zeros(part.num_outputs, np.float32) if part.bias is None else part.bias


def _end_to_end(parts: list[Array]) -> Array:
    """Concatenate arrays of bytes, without a copy if they follow one another in the same memory."""
    places = [address_of(part) for part in parts]
    ends = [place + len(part) for place, part in zip(places, parts, strict=True)]
    if places[1:] != ends[:-1] or len({_owner(part) for part in parts}) > 1:
        return np.concatenate(parts)
    return np.lib.stride_tricks.as_strided(parts[0], (ends[-1] - places[0],), (1,))


def _owner(array: Array) -> int:
    """Return a number that identifies the owner of a view's memory."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    is_tensor = hasattr(owner, "untyped_storage")
    return int(owner.untyped_storage().data_ptr()) if is_tensor else id(owner)


def pack_floats(weight: Array, bias: Array | None = None) -> PanelWeights:
    """Pack an (outputs, inputs) matrix in the smallest float form that represents all weights exactly.

    Args:
        weight: (outputs, inputs) float32, float16 or bfloat16, any strides.
        bias: (outputs,) float32.
    """
    weight = as_array(weight)
    if weight.dtype.name not in FLOATS:
        weight = weight.astype(np.float32)
    form = _narrowest(weight)
    num_outputs, width = weight.shape
    panels = PanelWeights(form, num_outputs, width, np.empty(0, np.uint8), bias)
    data = _on_lines(panels.num_bytes)
    for start in range(0, num_outputs, PANEL):
        # (steps, PANEL); a step is one input, or two for bfloat16.
        steps = _steps(weight[start : start + PANEL], form).T
        place = start // PANEL * panels.panel_bytes
        target = data[place : place + panels.panel_bytes].view(steps.dtype).reshape(-1, PANEL)
        target[: len(steps), : steps.shape[1]] = steps
    return replace(panels, data=data)


def _steps(rows: Array, form: Form) -> Array:
    """Convert weights to a float form; for bfloat16, pack two neighbors of a row into one uint32."""
    if form is not BFLOAT16:
        with np.errstate(over="ignore"):
            return rows.astype(np.float16 if form is FLOAT16 else np.float32, copy=False)
    halves = _bfloat16_bits(rows)
    if halves.shape[1] % 2:
        halves = np.pad(halves, ((0, 0), (0, 1)))
    return np.ascontiguousarray(halves).view(np.uint32)


def _bfloat16_bits(rows: Array) -> Array:
    """Return weights as the bits of bfloat16 numbers, which must represent them exactly."""
    if rows.dtype.name == BFLOAT16.name:
        return rows.view(np.uint16)
    bits: Array = (rows.astype(np.float32, copy=False).view(np.uint32) >> 16).astype(np.uint16)
    return bits


def _narrowest(weight: Array) -> Form:
    """Return the smallest float form that represents all weights exactly."""
    if weight.dtype.name == BFLOAT16.name:
        return BFLOAT16
    step = max(1, PIECE_NUMBERS // weight.shape[1])
    pieces = [weight[start : start + step] for start in range(0, len(weight), step)]
    if all(_fit_bfloat16(piece.astype(np.float32, copy=False)) for piece in pieces):
        return BFLOAT16
    if weight.dtype == np.float16 or all(map(_fit_float16, pieces)):
        return FLOAT16
    return FLOAT32


def _fit_bfloat16(numbers: Array) -> bool:
    return not (_bits(numbers) & 0xFFFF).any() and not np.isnan(numbers).any()


def _fit_float16(numbers: Array) -> bool:
    if (_bits(numbers) & 0x1FFF).any():  # below the last bit of a float16
        return False
    with np.errstate(over="ignore"):
        return np.array_equal(numbers.astype(np.float16).astype(np.float32), numbers)


def _bits(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers).view(np.uint32)


def empty_panels(form: Form, num_outputs: int, num_inputs: int) -> PanelWeights:
    """Allocate zeroed panels of a quantized form, for `fill_blocks` to write to."""
    shape = PanelWeights(form, num_outputs, num_inputs, np.empty(0, np.uint8))
    return replace(shape, data=_on_lines(shape.num_bytes))


def fill_blocks(panels: PanelWeights, start: int, header: Array, groups: Array) -> None:
    """Write the quantized weights of consecutive outputs to panels.

    Args:
        panels: result of `empty_panels`.
        start: index of the first output, a multiple of PANEL.
        header: (outputs, blocks, 1 or 2) float16 or float32: the scale of each block and, for int4 forms, the
            summand.
        groups: (outputs, blocks, inputs of a block) int8; or (outputs, blocks, 4) uint32, each of which holds
            eight int4 numbers.
    """
    blocks = panels.data.reshape(-1, panels.padded_inputs // panels.form.inputs, panels.form.block_bytes)
    blocks = blocks[start // PANEL :]
    _fill_lanes(blocks[..., : panels.form.header], header)
    _fill_lanes(blocks[..., panels.form.header :], groups)


def _fill_lanes(target: Array, values: Array) -> None:
    """Write `values` (outputs, blocks, n) to `target` (panels, blocks, bytes), memory of panels."""
    num_whole, num_left = divmod(len(values), PANEL)
    lanes = target.view(values.dtype)
    lanes = np.lib.stride_tricks.as_strided(
        lanes,
        (len(lanes), *values.shape[1:], PANEL),
        (*lanes.strides[:2], PANEL * values.itemsize, values.itemsize),
    )
    whole = values[: num_whole * PANEL].reshape(num_whole, PANEL, *values.shape[1:])
    lanes[:num_whole] = whole.transpose(0, 2, 3, 1)
    if num_left:
        lanes[num_whole, ..., :num_left] = values[num_whole * PANEL :].transpose(1, 2, 0)


def _on_lines(size: int) -> Array:
    """Allocate zeroed bytes, aligned to a cache line; pages are mapped at their first use."""
    memory = np.zeros(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size]


def _float32_rows(data: Array, panels: Array, lanes: Array) -> Array:
    return data.view(np.float32).reshape(len(data), -1, PANEL)[panels, :, lanes]


def _float16_rows(data: Array, panels: Array, lanes: Array) -> Array:
    return data.view(np.float16).reshape(len(data), -1, PANEL)[panels, :, lanes].astype(np.float32)


def _bfloat16_rows(data: Array, panels: Array, lanes: Array) -> Array:
    bits = data.view(np.uint16).reshape(len(data), -1, PANEL, 2)[panels, :, lanes]
    return (bits.reshape(len(panels), -1).astype(np.uint32) << 16).view(np.float32)


def _int4_rows(form: Form) -> Any:
    def read(data: Array, panels: Array, lanes: Array) -> Array:
        blocks = data.reshape(len(data), -1, form.block_bytes)
        header = blocks[..., : form.header].view(np.float16 if form is INT4 else np.float32)
        parts = header.reshape(*blocks.shape[:2], 2, PANEL)[panels, :, :, lanes].astype(np.float32)
        groups = (
            blocks[..., form.header :]
            .view(np.uint32)
            .reshape(*blocks.shape[:2], 4, PANEL)[panels, :, :, lanes]
        )
        values = (groups[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).astype(np.float32)
        values = values.reshape(len(panels), blocks.shape[1], 32)
        return (values * parts[..., :1] + parts[..., 1:]).reshape(len(panels), -1)

    return read


def _int8_rows(form: Form) -> Any:
    def read(data: Array, panels: Array, lanes: Array) -> Array:
        blocks = data.reshape(len(data), -1, form.block_bytes)
        header = blocks[..., : form.header].view(np.float16 if form is INT8 else np.float32)
        scales = header[panels, :, lanes].astype(np.float32)
        values = blocks[..., form.header :].view(np.int8).reshape(*blocks.shape[:2], form.inputs, PANEL)
        chosen = values[panels, :, :, lanes].astype(np.float32)
        return (chosen * scales[..., None]).reshape(len(panels), -1)

    return read


_READERS: dict[str, Any] = {
    FLOAT32.name: _float32_rows,
    FLOAT16.name: _float16_rows,
    BFLOAT16.name: _bfloat16_rows,
    INT4.name: _int4_rows(INT4),
    INT4_WIDE.name: _int4_rows(INT4_WIDE),
    INT8.name: _int8_rows(INT8),
    INT8_WIDE.name: _int8_rows(INT8_WIDE),
}
