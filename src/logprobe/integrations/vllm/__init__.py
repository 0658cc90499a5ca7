"""vLLM as the engine: its scheduler, cache and model, this library's draw and numbers.

A logits processor in vLLM's workers (`worker`) draws for our requests and keeps what it found; the front
(`engine`) fetches that by `collective_rpc`. Nothing private of vLLM is touched.
"""
