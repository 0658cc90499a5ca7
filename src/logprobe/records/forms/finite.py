"""Convert numbers for JSON: -inf becomes -9999, inf becomes 9999, NaN becomes None.

Log-probabilities are never inf, but extra columns of a record may be.
"""

from __future__ import annotations

from math import copysign, isinf
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

IMPOSSIBLE = -9999.0  # written for -inf, as other servers do


def finite(values: npt.ArrayLike) -> list[float | None]:
    """Convert values to what JSON can hold: -inf to -9999, inf to 9999, NaN and masked values to None."""
    # A masked array is an `ndarray`, and its `tolist` has None where values are masked.
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    return [finite_value(value) for value in array.tolist()]


def finite_value(value: float | None) -> float | None:
    """Convert one value as in `finite`; None stays None."""
    if value is None or value != value:  # noqa: PLR0124 - NaN
        return None
    return copysign(IMPOSSIBLE, value) if isinf(value) else value


def finite_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Apply `finite_value` to all floats in `fields`, including those within lists."""
    return {name: _finite_field(value) for name, value in fields.items()}


def _finite_field(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_field(item) for item in value]
    return finite_value(value) if isinstance(value, float) else value
