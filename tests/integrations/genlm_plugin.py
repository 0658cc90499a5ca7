"""A pytest plugin: while it is loaded, `backend="hf"` of genlm-backend and genlm-control is this library."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_served = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    from logprobe.integrations.genlm import serve_by_name

    _served.enter_context(serve_by_name())
    config.add_cleanup(_served.close)
