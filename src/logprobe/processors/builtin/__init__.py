"""Built-in logits processors."""
