"""oneDNN sees few shapes, and none is much larger than it must be."""

from __future__ import annotations

import torch

from logprobe.kernels.shapes import block_filled, num_filled, width_filled, with_zeros


def test_every_number_of_rows_of_a_step_takes_one_of_few() -> None:
    filled = {rows: num_filled(rows) for rows in range(513)}
    assert len(set(filled.values())) < 60
    assert all(filled[rows] == rows for rows in range(9))
    assert all(rows <= filled[rows] <= max(rows + 7, 1.07 * rows) for rows in filled)


def test_every_context_takes_one_of_few_widths() -> None:
    filled = {context: width_filled(context) for context in range(1, 1 << 17)}
    assert len(set(filled.values())) < 80
    assert all(context <= filled[context] <= max(context + 63, 1.13 * context) for context in filled)


def test_every_block_takes_a_power_of_two() -> None:
    assert [block_filled(rows) for rows in (1, 16, 17, 32, 33, 100, 128)] == [16, 16, 32, 32, 64, 128, 128]


def test_zeros_stand_where_they_are_wanted() -> None:
    part = torch.ones(2, 3).t()
    assert with_zeros(part).is_contiguous()
    filled = with_zeros(part, rows=1, rows_before=2, columns=1)
    assert filled.tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0]]
