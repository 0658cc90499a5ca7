"""The forward pass: model decoders, attention over the KV cache, LoRA weights."""
