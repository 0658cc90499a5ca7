"""vLLM as the engine: its scheduler, cache and model, this library's draw and numbers.

A logits processor in vLLM's workers (`worker`) draws for our requests and keeps what it found; the front
(`engine`) fetches that by `collective_rpc`. The attributes of vLLM that no documentation names, by which
`existing` takes an engine in, are listed in `internals.py`.
"""

from __future__ import annotations
