"""Whole next-token distributions: a bounded row cache, batches of concurrent calls, tokens as bytes.

`lm` joins the methods by concern; `base` looks rows up in the cache of `rows` by `Prefix`, which holds the
numbers of loads; `batcher` gathers what is missing, and `source` asks an engine, here or behind HTTP.
`AsyncLM`, `AsyncVirtualLM` and `RemoteLM` are what users call.
"""

from __future__ import annotations
