"""Float32 numbers as sums of bfloat16 numbers ("pieces"), which tensor cores multiply exactly.

A float32 number has 24 significant bits and a bfloat16 number has 8, so three pieces represent a float32
number exactly: the nearest bfloat16 number, the bfloat16 number nearest to the remainder, and the rest.
Activations are stored as pieces, (num_pieces, rows, width) bfloat16. With a single piece, arithmetic is plain
bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from logprobe.kernels.triton.launch import IS_INTERPRETED

if TYPE_CHECKING:
    from torch import Tensor

NUM_PIECES: Final = {"bf16x3": 3, "bf16": 1}  # by name of the arithmetic


def split(x: Tensor, num_pieces: int) -> Tensor:
    """Split float32 `x` (rows, width) into bfloat16 summands (num_pieces, rows, width)."""
    pieces = []
    for _ in range(num_pieces):
        pieces.append(x.to(torch.bfloat16))
        x = x - pieces[-1].float()
    return torch.stack(pieces)


def join(pieces: Tensor) -> Tensor:
    """Sum bfloat16 pieces (num_pieces, rows, width) to float32 numbers (rows, width)."""
    return pieces.double().sum(0).float()


@triton.jit
def multiply(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return `total` plus the product of two bfloat16 tiles (float32 in Triton's interpreter)."""
    if IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def store_pieces(
    out: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    x: tl.tensor,
    stride: tl.tensor,
    num_pieces: tl.constexpr,
) -> None:
    """Store float32 numbers `x` as pieces at `offsets`; consecutive pieces are `stride` elements apart."""
    for piece in tl.static_range(num_pieces):
        part = x.to(tl.bfloat16)
        tl.store(out + piece * tl.cast(stride, tl.int64) + offsets, part, mask=mask)
        x -= part.to(tl.float32)
