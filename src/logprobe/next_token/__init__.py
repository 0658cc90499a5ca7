"""Whole next-token distributions: bounded row cache, asks in flight, tokens as bytes.

Its way: `lm` looks in its `rows` by `Prefix`, which holds the numbers of loads → `batcher` gathers what is
missing → `source` asks an engine. Before it: `AsyncLM`, `AsyncVirtualLM` and `RemoteLM`, which people call.
After it: an engine that ends a request with a row, here or behind HTTP.
"""

from __future__ import annotations
