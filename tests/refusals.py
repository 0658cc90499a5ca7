"""How tests expect to be refused: by the class of the error and the parameter that it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    import re

ErrorT = TypeVar("ErrorT", bound=BaseException)


@dataclass
class Names:
    """Whether an error names a parameter; pytest prints it where one does not."""

    parameter: str

    def __call__(self, error: Any) -> bool:
        return bool(error.parameter == self.parameter)


def raises(
    kind: type[ErrorT], *, parameter: str | None = None, match: str | re.Pattern[str] | None = None
) -> pytest.RaisesExc[ErrorT]:
    """`pytest.raises`, for an error that names this parameter."""
    check = None if parameter is None else Names(parameter)
    return pytest.raises(kind, match=match, check=check)
