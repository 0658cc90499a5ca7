"""Numbers as JSON has them: -9999 for -inf, 9999 for inf, None for NaN.

A log-probability is never inf; a further column of a record may be.
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
    """Values that JSON has: -inf becomes IMPOSSIBLE, inf its opposite, NaN and a masked hole become None."""
    listed = np.ma.asarray(values).tolist()
    return [finite_value(value) for value in listed]


def finite_value(value: float | None) -> float | None:
    """`finite` of one value; None stays None."""
    if value is None or value != value:  # noqa: PLR0124 - NaN
        return None
    return copysign(IMPOSSIBLE, value) if isinf(value) else value


def finite_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields with finite floats, alone or in lists."""
    return {name: _finite_field(value) for name, value in fields.items()}


def _finite_field(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_field(item) for item in value]
    return finite_value(value) if isinstance(value, float) else value
