"""The logits processors that every engine has."""
