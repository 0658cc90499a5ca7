"""Assert errors by their class and the parameter they name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    import re

ErrorT = TypeVar("ErrorT", bound=BaseException)


@dataclass
class Names:
    """Check that an error names a parameter; pytest prints it if not."""

    parameter: str

    def __call__(self, error: Any) -> bool:
        return bool(error.parameter == self.parameter)


def raises(
    kind: type[ErrorT], *, parameter: str | None = None, match: str | re.Pattern[str] | None = None
) -> pytest.RaisesExc[ErrorT]:
    """Like `pytest.raises`, for an error that names this parameter."""
    check = None if parameter is None else Names(parameter)
    return pytest.raises(kind, match=match, check=check)
