"""Few shapes for oneDNN's products, whatever the number of rows.

oneDNN compiles a product for each shape and keeps the last thousand, some 1 MB each: a process that has seen
many would hold that much memory, and would have waited for each to be compiled. Before it: any number of
rows. After it: products on zeros more, which are cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

EXACT_ROWS = 8


def num_filled(rows: int) -> int:
    """Rows of a product on weights: each number up to 8, then steps of 8, from 256 on of a sixteenth."""
    step = 1 if rows <= EXACT_ROWS else max(8, 1 << max(0, rows.bit_length() - 5))
    return -(-rows // step) * step


def with_zeros(part: Tensor, rows: int) -> Tensor:
    """A contiguous (..., rows, columns) with so many rows of zeros more."""
    return functional.pad(part, (0, 0, 0, rows)) if rows else part.contiguous()
