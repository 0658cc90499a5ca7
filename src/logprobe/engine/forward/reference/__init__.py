"""Reference decoder: every family of `families` in plain NumPy float64, written to be read.

`logits` runs one whole text, without a KV cache, batches or blocks, and without torch or transformers. It is
the specification that the native decoder is tested against, and a first text for readers: `model` has the
loop over layers and calls `norms`, `rotary`, `attention`, `mlp` and `experts`; `settings` says what a
configuration means. LoRA weights and quantised products are left out: weights are plain arrays.
"""

from logprobe.engine.forward.reference.model import logits

__all__ = ["logits"]
