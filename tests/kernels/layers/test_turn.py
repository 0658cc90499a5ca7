"""Turned rows against numpy's own transposition."""

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from logprobe.kernels.layers.layout import TILE_ROWS
from logprobe.kernels.layers.numba.turn import turn_rows, turned_size
from logprobe.kernels.layers.numba.widen import tile_width


@njit
def turned(x: Any, stride: Any, num_rows: Any, num_inputs: Any, padded: Any) -> Any:
    out = np.full(turned_size(num_rows, padded), np.nan, np.float32)
    turn_rows(x, stride, num_rows, num_inputs, padded, out)
    return out


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8, 9, 20])
@pytest.mark.parametrize("num_inputs", [1, 15, 16, 100])
def test_tiles_are_rows_turned(num_rows: int, num_inputs: int) -> None:
    wide = torch.arange(num_rows * 120, dtype=torch.float32).view(num_rows, 120)
    x, padded = wide[:, 3 : 3 + num_inputs], num_inputs + -num_inputs % 32
    out = turned(x.data_ptr(), 4 * x.stride(0), num_rows, num_inputs, padded)
    for row in range(0, num_rows, TILE_ROWS):
        want = x[row : row + TILE_ROWS].T.numpy()
        width = tile_width.py_func(want.shape[1])
        tile = out[row * padded :][: padded * width].reshape(padded, width)[:, : want.shape[1]]
        assert np.array_equal(tile[:num_inputs], want)
        assert not tile[num_inputs:].any()
