"""An `AsyncLLM` on the engine of an open `LLM`, so that tests can compare the two on one model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from logprobe import AsyncLLM

if TYPE_CHECKING:
    from logprobe import LLM


def async_twin(llm: LLM) -> AsyncLLM:
    """Return an `AsyncLLM` that shares an LLM's engine, and that is closed with it."""
    twin = AsyncLLM.__new__(AsyncLLM)
    vars(twin).update(vars(llm))
    twin._owned = ExitStack()
    return twin
