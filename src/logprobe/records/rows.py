"""Rows of a step's numbers, and the table of the further columns that may stand beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

EXTRAS: Final[Mapping[str, np.dtype[Any]]] = {
    "entropy": np.dtype(np.float32),  # nats, of the position's whole distribution
    "log_kept_mass": np.dtype(np.float32),  # nats, of what masks and truncation kept of a processed row
}
"""The further columns of one number a position; their types have a NaN, which stands where none was given.

What is named here crosses every wall and stands in records, bytes, Arrow, tables and JSON as soon as a kernel
or the sampler fills it. Where `SamplingParams` has a flag of the same name, it is given to those who set it.
"""
