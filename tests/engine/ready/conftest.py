from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from logprobe.models.stored import store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, in which even small and passing models are stored."""
    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(store, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(store, "tempfile", SimpleNamespace(gettempdir=lambda: "/nowhere"))
    return tmp_path / "home"
