"""Reference decoder: every family of `families` in plain NumPy float64, written to be read.

`logits` runs one whole text, without a KV cache, batches or blocks, and without torch or transformers. It is
the specification that the native decoder is tested against, and a good place to start reading: `model` has
the loop over layers, whose parts are in `layers` and `rotary`; `settings` interprets a configuration. Weights
are plain arrays; LoRA weights and products with quantized weights are left out.
"""

from logprobe.engine.forward.reference.model import logits

__all__ = ["logits"]
