"""Next-token distributions over the whole vocabulary, with a bounded row cache and request batching.

A row is the distribution after one prefix: (vocab_size,) float32 log-probabilities. `lm` defines
`NextTokenLM`, the base class of the public `AsyncLM`, `AsyncVirtualLM` and `RemoteLM`. `base` looks up rows
in the cache (`rows`), `batcher` batches the missing ones, and `source` computes them on an engine.
"""

from __future__ import annotations
