"""oneDNN sees few shapes, and none is much larger than it must be."""

from __future__ import annotations

import torch

from logprobe.kernels.shapes import num_filled, with_zeros


def test_every_number_of_rows_of_a_step_takes_one_of_few() -> None:
    filled = {rows: num_filled(rows) for rows in range(513)}
    assert len(set(filled.values())) < 60
    assert all(filled[rows] == rows for rows in range(9))
    assert all(rows <= filled[rows] <= max(rows + 7, 1.07 * rows) for rows in filled)


def test_rows_of_zeros_stand_after_those_that_there_are() -> None:
    part = torch.ones(2, 3).t()
    assert with_zeros(part, 0).is_contiguous()
    assert with_zeros(part, 2).tolist() == [[1, 1], [1, 1], [1, 1], [0, 0], [0, 0]]
