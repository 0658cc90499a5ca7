"""Few shapes for oneDNN's products, whatever the number of rows or the length of a context.

oneDNN compiles a product for each shape and keeps the last thousand, some 1 MB each: a process that has seen
many lengths would hold that much memory, and would have waited for each to be compiled. Before it: rows or a
context of any length. After it: products on zeros more, which are cut off.
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


def block_filled(rows: int) -> int:
    """Rows of a block of attention: powers of two from 16 on."""
    return max(16, 1 << (rows - 1).bit_length())


def width_filled(context: int) -> int:
    """Columns of a block of attention: multiples of 64, an eighth more at most from 512 on."""
    step = max(64, 1 << max(0, context.bit_length() - 4))
    return -(-context // step) * step


def with_zeros(part: Tensor, *, rows: int = 0, rows_before: int = 0, columns: int = 0) -> Tensor:
    """A contiguous (..., rows, columns) with so many zeros more."""
    if rows or rows_before or columns:
        return functional.pad(part, (0, columns, rows_before, rows))
    return part.contiguous()
