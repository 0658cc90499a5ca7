"""Garbage collection while an engine runs, and the memory freed when it closes."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

from logprobe import LLM, SamplingParams
from logprobe.engine.forward import process_memory

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Cycle:
    """References itself, so that only a garbage collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_a_collection_walks_past_what_was_there_at_load_and_through_all_after_close(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "gc", gc)  # the suite replaces it
    cycle = Cycle()
    is_freed = weakref.ref(cycle)
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        del cycle
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
        gc.collect()
        assert is_freed() is not None
        assert llm.generate("the cat", SamplingParams(max_tokens=2))[0].outputs
    gc.collect()
    assert is_freed() is None
