"""One vLLM engine for this folder's tests, with few rows and short chunks, so that requests queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logprobe.config import EngineConfig
from logprobe.engine.backends.start import LoadedModel, start_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = 8  # in a batch
CHUNK = 32  # tokens per step
OPTIONS: dict[str, Any] = {"enforce_eager": True, "block_size": 32}


@pytest.fixture(scope="session")
def vllm_config(wide_heads: tuple[Path, dict[str, Path]]) -> EngineConfig:
    return EngineConfig(
        model=str(wide_heads[0]),
        engine="vllm",
        kv_cache_memory_bytes=1 << 23,
        max_num_seqs=ROWS,
        max_num_batched_tokens=CHUNK,
        engine_options=OPTIONS,
    )


@pytest.fixture(scope="session")
def on_vllm(vllm_config: EngineConfig) -> Iterator[LoadedModel]:
    loaded = start_engine(vllm_config)
    yield loaded
    loaded.engine.close()


@pytest.fixture(scope="session")
def native(wide_heads: tuple[Path, dict[str, Path]]) -> Iterator[LoadedModel]:
    """The engine that vLLM is compared with."""
    loaded = start_engine(
        EngineConfig(model=str(wide_heads[0]), kv_cache_memory_bytes=1 << 22, weights="checkpoint")
    )
    yield loaded
    loaded.engine.close()
