"""A pytest plugin that makes `backend="hf"` of genlm-backend and genlm-control use this library."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    import pytest

_served = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    from logprobe.integrations.genlm import serve_by_name

    # Some of these tests have hypothesis' deadline of 200 ms, which only makes sense on an idle machine.
    settings.register_profile("steady", deadline=None)
    settings.load_profile("steady")
    _served.enter_context(serve_by_name())
    config.add_cleanup(_served.close)
