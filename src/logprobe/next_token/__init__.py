"""Next-token distributions over the whole vocabulary, with a bounded row cache and request batching.

`lm` defines `NextTokenLM`, the base class of the public `AsyncLM`, `AsyncVirtualLM` and `RemoteLM`. `base`
looks up rows in the cache (`rows`), `batcher` batches the misses, and `source` computes them on an engine.
"""

from __future__ import annotations
