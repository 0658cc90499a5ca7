"""Read GGUF files as a transformers configuration, tokenizer and weights."""
