"""A pytest plugin: while it is loaded, `backend="hf"` of genlm-backend and genlm-control is this library."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    import pytest

_served = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    from logprobe.integrations.genlm import serve_by_name

    # Some of these tests have hypothesis' own deadline of 200 ms, which is a clock's and not the model's.
    settings.register_profile("steady", deadline=None)
    settings.load_profile("steady")
    _served.enter_context(serve_by_name())
    config.add_cleanup(_served.close)
