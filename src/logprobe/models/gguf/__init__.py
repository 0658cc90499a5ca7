"""GGUF files → configuration, tokenizer and weights as transformers keeps them."""
