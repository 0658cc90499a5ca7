"""Next-token distributions over the whole vocabulary, with a bounded row cache and request batching.

A row is the distribution after one prefix: (vocab_size,) float32 log-probabilities. `AsyncLM` computes rows
with a model in this process and `AsyncVirtualLM` with vLLM; `logprobe.RemoteLLM` gets them from a server.
`lm` defines their base class `NextTokenLM`. `base` looks up rows in the cache (`rows`), `batcher` batches the
missing ones, and `source` computes them on an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe._lazy import lazy_names

if TYPE_CHECKING:
    from logprobe.integrations.vllm.virtual_lm import AsyncVirtualLM
    from logprobe.next_token.async_lm import AsyncLM
    from logprobe.next_token.rows import Token

_HOMES = {
    "AsyncLM": ".async_lm",
    "AsyncVirtualLM": "logprobe.integrations.vllm.virtual_lm",
    "Token": ".rows",
}

__all__ = ["AsyncLM", "AsyncVirtualLM", "Token"]

__getattr__ = lazy_names(__name__, _HOMES)
