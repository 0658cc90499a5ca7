"""Shared fixtures of the scoring tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from logprobe import LLM

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def rough_llm(tiny_model_folder: Path) -> Iterator[LLM]:
    """The tiny model with lower precision than `tiny_llm`."""
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21, dtype="bfloat16") as llm:
        yield llm
