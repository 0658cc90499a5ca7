"""Quantized weights on a GPU: integers in blocks of inputs, each with a scale and, for int4, a summand.

They are the weights of a GGUF file, bit for bit; a product reads them as they are and computes each weight in
registers (`products`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.kernels.layers.layout import INT4, INT4_WIDE, INT8_WIDE, PANEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.kernels.layers.forms import PanelWeights


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix whose weights are integer * scale + summand."""

    values: Tensor  # (outputs, inputs) int8; or (outputs, inputs / 2) uint8, input 2i in the low four bits
    header: Tensor  # (outputs, blocks, 1 or 2) float16 or float32: scale and summand of each block
    block: int  # number of inputs in a block

    @property
    def is_int4(self) -> bool:
        """True if two weights share a byte."""
        return self.values.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        num_outputs, num_blocks, _ = self.header.shape
        return num_outputs, num_blocks * self.block

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> BlockWeight:
        return BlockWeight(self.values[rows], self.header[rows], self.block)

    def float(self) -> Tensor:
        """Return all weights, (outputs, inputs) float32."""
        values = self.values
        if self.is_int4:
            values = torch.stack((values & 15, values >> 4), -1).flatten(1)
        parts = self.header.float()
        blocks = values.float().view(len(values), -1, self.block) * parts[..., :1]
        if parts.shape[2] == 2:
            blocks += parts[..., 1:]
        return blocks.flatten(1)


def joined(parts: Sequence[BlockWeight]) -> BlockWeight | None:
    """Return one matrix with the outputs of all parts; None if their formats differ."""
    kinds = {(part.values.dtype, part.header.dtype, part.header.shape[1:], part.block) for part in parts}
    if len(kinds) > 1:
        return None
    values, headers = (torch.cat(one) for one in zip(*((p.values, p.header) for p in parts), strict=True))
    return BlockWeight(values, headers, parts[0].block)


def from_panels(panels: PanelWeights, device: str | torch.device) -> BlockWeight | None:
    """Return the weights of quantized panels on a device; None if the panels hold floats."""
    form = panels.form
    if form.header == 0:
        return None
    num_outputs, num_inputs = panels.num_outputs, panels.num_inputs
    num_blocks = panels.padded_inputs // form.inputs
    blocks = panels.data[: panels.num_bytes].reshape(-1, num_blocks, form.block_bytes)
    is_int4 = form in {INT4, INT4_WIDE}
    num_parts = 2 if is_int4 else 1
    dtype = np.float32 if form in {INT4_WIDE, INT8_WIDE} else np.float16
    header = _by_output(blocks[..., : form.header].view(dtype), num_parts)
    body = blocks[..., form.header :]
    if is_int4:
        values = _by_output(body.view(np.uint32), form.inputs // 8).view(np.uint8)
    else:
        values = _by_output(body.view(np.int8), form.inputs)
    num_blocks = num_inputs // form.inputs
    values = values.reshape(len(values), -1)[:num_outputs, : num_inputs // (2 if is_int4 else 1)]
    return BlockWeight(
        torch.from_numpy(np.ascontiguousarray(values)).to(device),
        torch.from_numpy(np.ascontiguousarray(header[:num_outputs, :num_blocks])).to(device),
        form.inputs,
    )


def _by_output(lanes: NDArray[Any], num: int) -> NDArray[Any]:
    """Return (panels, blocks, num * PANEL) numbers as (panels * PANEL, blocks, num)."""
    parts = lanes.reshape(*lanes.shape[:2], num, PANEL).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(parts).reshape(-1, lanes.shape[1], num)
