"""Whole next-token distributions: bounded row cache, asks in flight, tokens as bytes.

Before it: `AsyncLM`, `AsyncVirtualLM` and `RemoteLM`, which people call. After it: an engine that ends a
request with a row, here or behind HTTP.
"""

from __future__ import annotations
