"""The exponential that all kernels share, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from logprobe.kernels.threads.numba.vectors import LOWEST, exponential


@njit
def fill(d: Any, out: Any) -> None:
    for i in range(d.size):
        out[i] = exponential(d[i])


def test_the_exponential_is_as_near_as_it_says_and_has_no_bias_where_it_weighs() -> None:
    d = np.linspace(LOWEST, 0, 1_000_001, dtype=np.float32)
    found = np.empty_like(d)
    fill(d, found)
    errors = found.astype(np.float64) / np.exp(d.astype(np.float64)) - 1
    assert (np.abs(errors) <= 2e-7 + 1.4e-8 * np.abs(d)).all()
    assert found[-1] == 1
    # What a sum over a row is off by, whose terms weigh as they are large.
    assert abs(np.average(errors, weights=found)) < 2e-8
